"""For all tests: a Ctrl-C reaches them and what they start."""

import signal

# A shell without a terminal starts what is put behind '&' with SIGINT ignored, and children inherit
# that: the tests of Ctrl-C would wait in vain.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
