"""Snapshots of a model on the GPU: how long the training stands still, and what a load takes.

    python tests/bench/gpu_snapshot.py [--rounds 8]

GPT-2 124M in fp32 with AdamW's moments (1.4 GiB) on one rank. Saves in memory take turns with a
copy of the same tensors into page-locked memory that is there already (what the link allows), and
with torch.save to memory (/dev/shm); loads with torch.load and load_state_dict. One JSON line each;
`ratio` = the plain copy's time / this one's.
"""

import tempfile
from pathlib import Path

import gpu
import pairing
import torch


def trained(device, options):
    model = gpu.gpt2(device, options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    x, y = gpu.tokens(device, options)
    model(x, y)[1].backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def tensors_of(model, optimizer) -> list[torch.Tensor]:
    kept = [*model.parameters(), *model.buffers()]
    kept += [v for state in optimizer.state.values() for v in state.values()]
    return [v.detach() for v in kept if isinstance(v, torch.Tensor)]


def page_locked(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)


def saves(model, optimizer, snapshot, path: Path) -> dict:
    tensors = tensors_of(model, optimizer)
    on_host = [page_locked(v) for v in tensors]

    def copy():
        for host, value in zip(on_host, tensors, strict=True):
            host.copy_(value, non_blocking=True)

    def write():
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(state, path)

    return {
        "copy to page-locked memory": copy,
        "libddp": lambda: snapshot.save(1, model, optimizer),
        "torch.save": write,
    }


def loads(model, optimizer, snapshot, path: Path, device) -> dict:
    tensors = tensors_of(model, optimizer)
    on_host = [page_locked(v).copy_(v) for v in tensors]

    def copy():
        for host, value in zip(on_host, tensors, strict=True):
            value.copy_(host, non_blocking=True)

    def read():
        state = torch.load(path, map_location=device)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    return {
        "copy from page-locked memory": copy,
        "libddp": lambda: snapshot.load(model, optimizer),
        "torch.load": read,
    }


def main() -> None:
    options = gpu.parser(__doc__, rounds=8, batch=1, **gpu.GPT2).parse_args()
    device = gpu.begin(options)
    gpu.alone(device)
    import libddp

    model, optimizer = trained(device, options)
    with (
        tempfile.TemporaryDirectory(dir="/dev/shm", prefix="libddp-gpu-snapshot-") as folder,
        libddp.Snapshot(f"{folder}/run", linger=1) as snapshot,
    ):
        snapshot.load(model, optimizer)
        mib = sum(v.nbytes for v in tensors_of(model, optimizer)) / 2**20
        path = Path(folder) / "state.pt"
        for what, made in (
            ("save", saves(model, optimizer, snapshot, path)),
            ("load", loads(model, optimizer, snapshot, path, device)),
        ):
            steps = {name: gpu.block(call, 1, device) for name, call in made.items()}
            lines = pairing.compare(steps, rounds=options.rounds, case=f"{what} of {mib:.0f} MiB")
            gpu.emit(lines)


if __name__ == "__main__":
    main()
