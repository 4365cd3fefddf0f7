"""What a rank of checks.suite does: the checks of a test file, inside a group of all ranks."""

import shutil

import checks
import ranks_child
import torch.distributed as dist


def run(path: str, backend: str) -> dict[str, str | None]:
    from libddp.distributed import destroy_process_group, init_process_group

    init_process_group(backend)
    results = checks.run(vars(ranks_child.load(path)))
    dist.barrier()
    for folder in checks.folders if dist.get_rank() == 0 else ():
        shutil.rmtree(folder, ignore_errors=True)
    destroy_process_group()
    return results
