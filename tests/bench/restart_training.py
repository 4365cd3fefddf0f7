"""The workers of restart.py: one step in each start, then rank 1 is killed.

python restart_training.py '{"saves": "TorchFile", "folder": "out", "layers": 8, "peer": "torch"}'

Rank 0 writes a line of times for each start, rank 1 one for each kill, into `folder`/times.txt.
"""

import time

FIRST = time.monotonic()

import json  # noqa: E402
import os  # noqa: E402
import sys  # noqa: E402
from pathlib import Path  # noqa: E402

import recovery_saves  # noqa: E402
import torch  # noqa: E402


def write(config: dict, *words) -> None:
    with open(Path(config["folder"], "times.txt"), "a") as file:
        print(*words, file=file)


def first_step(config: dict, kind, wrap):
    """The model, what has loaded it, and its step; times of torch._dynamo's import and the end."""
    import torch._dynamo  # as optimizers do when they are made

    imported = time.monotonic()
    matrices = [torch.nn.Linear(1024, 1024, bias=False) for _ in range(config["layers"])]
    model = wrap(torch.nn.Sequential(*matrices))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    saves = kind(config["folder"], model, optimizer, file_every=config["file_every"])
    step = saves.load()
    model(torch.ones(4, 1024)).mean().backward()
    optimizer.step()
    return saves, step, (imported, time.monotonic())


def end(config: dict, dist, saves) -> None:
    """Of this start: nobody goes on, or rank 1 is killed."""
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == os.environ["TORCHELASTIC_MAX_RESTARTS"]:
        saves.close()
        dist.destroy_process_group()
    elif dist.get_rank() == 1:
        write(config, "killed", time.monotonic())
        os.kill(os.getpid(), 9)
    elif config["peer"] == "libddp-in-place":
        dist.barrier()
    else:
        time.sleep(600)


def main(config: dict, kind, imported: float) -> None:
    dist, wrap = kind.parts()
    times = [FIRST, imported]
    if config["peer"] == "libddp-in-place":
        import libddp

        if libddp.elastic.info().is_survivor:
            times = [time.monotonic()] * 2
    dist.init_process_group(kind.backend)
    rank = dist.get_rank()
    Path(config["folder"], f"pid-{rank}").write_text(str(os.getpid()))
    dist.all_reduce(torch.ones(1))
    times.append(time.monotonic())
    saves, step, found = first_step(config, kind, wrap)
    if rank == 0:
        write(config, "start", *times, *found, step)
    saves.save(step + 1)
    saves.finish()
    dist.barrier()
    end(config, dist, saves)


if __name__ == "__main__":
    chosen = json.loads(sys.argv[1])
    chosen_kind = recovery_saves.find(chosen["saves"])
    chosen_kind.parts()
    chosen_kind.run(main)(chosen, chosen_kind, time.monotonic())
