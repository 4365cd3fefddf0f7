"""Host time of enqueueing a collective on one rank: libddp, torch's ProcessGroupNCCL, raw NCCL.

    python tests/bench/gpu_enqueue.py [--rounds 30] [--calls 100]

Each measurement is a number of calls without a wait for the device, which is idle before it. "raw"
calls ncclAllReduce through ctypes on a communicator of its own; "ctypes" is what such a call costs
without NCCL (ncclGetVersion), and is contained in "raw". Asynchronous calls are waited for, which
orders streams. Times are per call.
"""

import ctypes

import gpu
import pairing
import torch
import torch.distributed as c10d


class UniqueId(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_byte * 128)]


class RawNccl:
    """One communicator of one rank. The library is the one that torch has loaded."""

    SUM, FLOAT32 = 0, 7

    def __init__(self):
        self.library = ctypes.CDLL("libnccl.so.2")
        self.library.ncclAllReduce.argtypes = [
            ctypes.c_void_p,
            ctypes.c_void_p,
            ctypes.c_size_t,
            ctypes.c_int,
            ctypes.c_int,
            ctypes.c_void_p,
            ctypes.c_void_p,
        ]
        self.library.ncclCommInitRank.argtypes = [
            ctypes.c_void_p,
            ctypes.c_int,
            UniqueId,
            ctypes.c_int,
        ]
        self.comm, name = ctypes.c_void_p(), UniqueId()
        self.check(self.library.ncclGetUniqueId(ctypes.byref(name)))
        self.check(self.library.ncclCommInitRank(ctypes.byref(self.comm), 1, name, 0))

    @staticmethod
    def check(result: int) -> None:
        if result:
            raise RuntimeError(f"NCCL: error {result}")

    def all_reduce(self, tensor: torch.Tensor):
        place, count, comm = tensor.data_ptr(), tensor.numel(), self.comm.value
        stream = torch.cuda.current_stream().cuda_stream
        function, check = self.library.ncclAllReduce, self.check
        return lambda: check(function(place, place, count, self.FLOAT32, self.SUM, comm, stream))

    def nothing(self):
        version = ctypes.byref(ctypes.c_int())
        return lambda: self.library.ncclGetVersion(version)


def waited(call):
    return lambda: call(async_op=True).wait()


def candidates(device, group, numel: int) -> dict:
    import libddp.distributed as dist

    def tensor():
        return torch.zeros(numel, device=device)

    mine, theirs = tensor(), tensor()

    def ours(async_op=False):
        return dist.all_reduce(mine, async_op=async_op)

    def torchs(async_op=False):
        return c10d.all_reduce(theirs, group=group, async_op=async_op)

    found = {}
    if device.type == "cuda":
        raw = RawNccl()
        found = {"raw": raw.all_reduce(tensor()), "ctypes": raw.nothing()}
    registered = dist.allocate(numel, device=device).zero_()
    return found | {
        "libddp sync": ours,
        "libddp async": waited(ours),
        "libddp allocated": lambda: dist.all_reduce(registered),
        "torch sync": torchs,
        "torch async": waited(torchs),
    }


def main() -> None:
    options = gpu.parser(__doc__, rounds=30, calls=100).parse_args()
    device = gpu.begin(options)
    group = gpu.alone(device)
    for numel in (1024, 25 << 18):
        lines = pairing.compare(
            candidates(device, group, numel),
            rounds=options.rounds,
            repeat=options.calls,
            warmup=20,
            settle=lambda: gpu.synchronize(device),
            case=f"enqueue an all_reduce of {numel * 4} bytes",
        )
        for line in lines:
            line |= {"min_us": line["min"] * 1e6, "median_us": line["median"] * 1e6}
        gpu.emit(lines)
        report(gpu.by_name(lines), numel * 4)


def report(rows: dict[str, dict], size: int) -> None:
    def us(name):
        return rows[name]["median_us"]

    for way in ("sync", "async"):
        if "raw" in rows:
            over = us(f"libddp {way}") - us("raw")
            gpu.target(f"G2 {way}, {size} B, us above raw NCCL", "<= 2", over, met=over <= 2)
        ratio = us(f"torch {way}") / us(f"libddp {way}")
        gpu.target(f"G2 {way}, {size} B, torch / libddp", ">= 3", ratio, met=ratio >= 3)


if __name__ == "__main__":
    main()
