"""What a script leaves for its test: a file of JSON for each rank. Names only torch."""

import json
import os
from pathlib import Path

import torch
import torch.distributed as dist


def write(losses, model) -> None:
    """Losses, whose class `model` is, and whose backend moves the bytes of the default group."""
    group = dist.distributed_c10d._get_default_group()
    found = {
        "losses": [float(loss) for loss in losses],
        "wrapper": type(model).__module__.partition(".")[0],
        "backend": group._get_backend(torch.device("cpu")).name(),
        "weight": sum(float(p.detach().double().sum()) for p in model.parameters()),
    }
    path = Path(os.environ["RESULTS"]) / f"{dist.get_rank()}.json"
    path.write_text(json.dumps(found))
