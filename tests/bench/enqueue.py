"""libddp's own host time of enqueueing a collective: a device and an NCCL that take no time.

    LIBDDP_NULL_DEVICE=build/tests/bench/libddp_null_device.so python tests/bench/enqueue.py

On one rank, beside torch's Python functions over its "fake" backend, which makes no Work of its own
and keeps nothing: less than any backend of torch's takes. Calls come in bursts, as in a step, and
the threads of the library are at rest between them. Times are per call. gpu_enqueue.py has the
same calls on a GPU.
"""

import argparse
import ctypes
import os
import time
import types

import pairing
import torch
import torch.distributed as c10d

NAME = "null"
PAUSE_S = 0.005


def load_device() -> None:
    """Registers the device, and the NCCL that libddp uses from now on."""
    import libddp.distributed  # noqa: F401  its library must be loaded first

    path = os.environ["LIBDDP_NULL_DEVICE"]
    torch.ops.load_library(path)
    torch.utils.rename_privateuse1_backend(NAME)
    module = types.ModuleType(f"torch.{NAME}")
    module._lazy_init = lambda: None
    module.is_available = lambda: True
    torch._register_device_module(NAME, module)
    ctypes.CDLL(path).libddp_null_device_install()
    capability = c10d.Backend.backend_capability
    capability["libddp"] = [*capability["libddp"], NAME]


def candidates(numel: int) -> dict:
    import libddp.distributed as dist
    import torch.testing._internal.distributed.fake_pg

    dist.init_process_group(store=c10d.HashStore(), rank=0, world_size=1)
    device, host = torch.empty(numel, device=NAME), torch.zeros(numel)
    group = c10d.new_group(backend="fake")

    def ours(async_op=False):
        return dist.all_reduce(device, async_op=async_op)

    def torchs(async_op=False):
        return c10d.all_reduce(host, group=group, async_op=async_op)

    return {
        "torch sync": torchs,
        "libddp sync": ours,
        "torch async": lambda: torchs(async_op=True).wait(),
        "libddp async": lambda: ours(async_op=True).wait(),
        "libddp gather": lambda: dist.all_gather_into_tensor(device, device),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--calls", type=int, default=100)
    options = parser.parse_args()
    load_device()
    lines = pairing.compare(
        candidates(1024),
        rounds=options.rounds,
        repeat=options.calls,
        warmup=20,
        settle=lambda: time.sleep(PAUSE_S),
        case="enqueue",
    )
    for line in lines:
        pairing.emit(line | {"min_us": line["min"] * 1e6, "median_us": line["median"] * 1e6})


if __name__ == "__main__":
    main()
