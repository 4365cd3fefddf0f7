"""How long torch's launchers wait between two looks at what the others say.

Replaces `_delay` in the module of torch's dynamic rendezvous: up to 0.3 s before a meeting and 1 s
between looks, which is right for a thousand hosts that read one entry, and most of what a restart
of a few takes. Nothing of it is a setting. `libddp run` asks for it, in its own process; it stays
for good.
"""

from __future__ import annotations

from libddp._torch_patches.replacing import LAUNCHER

#: From so many hosts on torch's delays stay what they are.
_MANY_HOSTS = 100
_LEAST = 0.1


def share(max_hosts: int) -> float:
    """What becomes of a delay where so many hosts may take part."""
    return min(1.0, max(_LEAST, max_hosts / _MANY_HOSTS))


def scale(max_hosts: int) -> None:
    """Shortens delays for a run of at most so many hosts."""
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous

    delay, factor = LAUNCHER.torchs(dynamic_rendezvous._delay), share(max_hosts)

    def delay_less(seconds) -> None:
        if isinstance(seconds, tuple):
            delay(tuple(factor * each for each in seconds))
        else:
            delay(factor * seconds)

    LAUNCHER.put(dynamic_rendezvous, "_delay", delay_less)
