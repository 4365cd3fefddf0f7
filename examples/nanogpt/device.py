"""Where a script computes, and in which dtype.

device = choose("auto")             # cuda:LOCAL_RANK where there is a GPU, else the CPU
precision("auto", device)           # "bfloat16" on a GPU that has it
"""

import os

import torch
from config import UserError


def choose(wanted: str) -> torch.device:
    """The device of `--device=WANTED`: one GPU per rank, by LOCAL_RANK. Raises: UserError."""
    kind = wanted
    if kind == "auto":
        kind = "cuda" if torch.cuda.is_available() else "cpu"
    if kind not in ("cpu", "cuda") or (kind == "cuda" and not torch.cuda.is_available()):
        raise UserError(f"--device={wanted}: there is no such device here")
    if kind == "cpu":
        return torch.device("cpu")
    index, count = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if index >= count:
        raise UserError(
            f"--device={wanted}: rank {index} of this host has no GPU, there are {count}; start "
            "one rank for each, or pass --device=cpu"
        )
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    torch.set_float32_matmul_precision("high")  # TF32 in float32 products, as nanoGPT
    return device


def precision(wanted: str, device: torch.device) -> str:
    """Name of the dtype to compute in; "auto" as nanoGPT: half on GPUs, float32 elsewhere."""
    if wanted != "auto":
        return wanted
    if device.type != "cuda":
        return "float32"
    return "bfloat16" if torch.cuda.is_bf16_supported() else "float16"
