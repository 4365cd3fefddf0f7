"""Snapshots of a training in memory that outlives its processes, and in a folder behind it.

    import libddp

    snapshot = libddp.Snapshot("out/run")
    extra = snapshot.load(model, optimizer)                 # {} where there is none
    for step in range(extra.get("step", 0), 1000):
        train(step)
        done = {"step": step + 1}
        snapshot.save(step + 1, model, optimizer, extra=done, storage=step % 100 == 99)
    snapshot.close()

docs/snapshots.md has the whole of it.
"""

from libddp.snapshot._snapshot import SaveReport, Snapshot

__all__ = ["SaveReport", "Snapshot"]
