"""The training of goodput.py, in the way that `saves` names (tests/bench/recovery_saves.py).

python goodput_training.py '{"saves": "TorchFile", "folder": "out", "pause": 0.1, "file_every": 20,
                             "width": 512}'
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "bench"))

import recovery_saves
import torch


def build(config: dict, wrap):
    width = config["width"]
    layers = [torch.nn.Linear(width, width) for _ in range(4)]
    model = wrap(torch.nn.Sequential(*layers))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def append(path: Path, line: str) -> None:
    with open(path, "a") as file:
        file.write(line + "\n")


def main(config: dict) -> None:
    kind, folder = recovery_saves.find(config["saves"]), config["folder"]
    dist, wrap = kind.parts()
    dist.init_process_group(kind.backend)
    rank = dist.get_rank()
    Path(folder, f"pid-{rank}").write_text(str(os.getpid()))
    torch.set_num_threads(1)
    torch.manual_seed(3)
    model, optimizer = build(config, wrap)
    saves = kind(folder, model, optimizer, config["file_every"])
    step = saves.load()
    while True:
        optimizer.zero_grad()
        model(torch.randn(4, config["width"])).square().mean().backward()
        optimizer.step()
        time.sleep(config["pause"])
        step += 1
        saves.save(step)
        if rank == 0:
            append(Path(folder, "steps.txt"), f"{time.monotonic():.6f} {step}")


if __name__ == "__main__":
    chosen = json.loads(sys.argv[1])
    recovery_saves.find(chosen["saves"]).run(main)(chosen)
