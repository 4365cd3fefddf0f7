"""Failures on purpose: what every rank learns of them, how soon, and that nothing is left behind.

    python tests/systems/failures                  # prints the table, a few trials of each case
    python tests/systems/failures --trials full    # with the numbers of trials of the table in docs
    python tests/systems/failures --only kill      # cases whose name has the word

The same cases are tests (test_failures.py); `LIBDDP_FAILURE_TRIALS=full` or a number changes how
often each is tried there. Parts: fleet.py starts ranks and ends them, rank.py is what a rank uses,
case.py is what a case is, cases_*.py are the cases, leftovers.py looks for remains.
"""
