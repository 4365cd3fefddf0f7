"""Two ranks on one GPU: libddp's NCCL backend beside torch's ProcessGroupNCCL on the same library.

    export LD_PRELOAD=.../libnccl.so.2 NCCL_MULTI_RANK_GPU_ENABLE=1 NCCL_MAX_CTAS=8
    bash tests/gpu/with_mps.sh python tests/bench/gpu_two_ranks.py [--rounds 10]

Needs NCCL 2.30. It shows what the wrapper costs and how well memory is used, nothing about NVLink
or networks. busbw_GBps counts 2 (p - 1) / p times the buffer for an all-reduce, (p - 1) / p for the
others.
"""

import os

import gpu
import pairing
import ranks
import torch
import torch.distributed as c10d

KIB, MIB = 1 << 10, 1 << 20
SIZES = [4 * KIB, 64 * KIB, MIB, 25 * MIB, 128 * MIB]
OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter")


def call_of(api, group, operation: str, full: torch.Tensor, part: torch.Tensor):
    if operation == "all_reduce":
        return lambda: api.all_reduce(full, group=group)
    if operation == "all_gather":
        return lambda: api.all_gather_into_tensor(full, part, group=group)
    return lambda: api.reduce_scatter_tensor(part, full, group=group)


def measure(options) -> list[dict]:
    """On each rank; rank 0's numbers are reported."""
    import libddp.distributed as dist

    device = gpu.begin(options)
    is_cuda = device.type == "cuda"
    dist.init_process_group("cpu:gloo,cuda:nccl" if is_cuda else "gloo")
    theirs = c10d.new_group(backend="nccl" if is_cuda else "gloo")
    lines = []
    for operation in OPERATIONS:
        for size in SIZES[: options.sizes]:
            numel = size // 2

            def buffers(make, numel=numel):
                return make(numel), make(numel // 2)

            def plain(n):
                return torch.zeros(n, device=device, dtype=torch.bfloat16)

            def allocated(n):
                return dist.allocate(n, device=device, dtype=torch.bfloat16).zero_()

            calls = {
                "torch": call_of(c10d, theirs, operation, *buffers(plain)),
                "libddp": call_of(dist, None, operation, *buffers(plain)),
                "libddp allocated": call_of(dist, None, operation, *buffers(allocated)),
            }
            repeat = 50 if size <= MIB else 5
            found = pairing.compare(
                {name: gpu.block(call, repeat, device) for name, call in calls.items()},
                rounds=options.rounds,
                settle=dist.barrier,  # of the hosts: both ranks start together
                case=f"{operation}, 2 ranks on one GPU",
                size_bytes=size,
            )
            factor = 1.0 if operation == "all_reduce" else 0.5
            for line in pairing.per(found, repeat):
                line["busbw_GBps"] = factor * size / line["median"] / 1e9
            lines += found
    dist.destroy_process_group()
    return lines


def main() -> None:
    options = gpu.parser(__doc__, rounds=10, sizes=len(SIZES)).parse_args()
    gpu.begin(options)
    if options.device != "cpu" and os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") != "1":
        print("SKIPPED gpu_two_ranks.py: NCCL 2.30 and NCCL_MULTI_RANK_GPU_ENABLE=1 are needed")
        return
    variables = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
    lines = ranks.run(measure, 2, options, deadline=70, env=variables)[0]
    gpu.emit(lines)
    worst = min(line["ratio_median"] for line in lines if line["candidate"] == "libddp")
    gpu.target("G3 busbw of two ranks, worst libddp / torch", ">= 0.99", worst, met=worst >= 0.99)


if __name__ == "__main__":
    main()
