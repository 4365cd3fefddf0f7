"""What a rank of checks.suite does: the checks of a test file, inside a group of all ranks."""

import shutil

import checks
import ranks
import ranks_child
import torch.distributed as dist


def run(path: str, begin: str, is_apart: bool) -> dict[str, str | None]:
    """`begin`: a backend, or the function of the test file that makes the group. `is_apart`: this
    rank is alone on its host."""
    if is_apart:
        ranks.live_apart()
    from libddp.distributed import destroy_process_group, init_process_group, is_initialized

    namespace = vars(ranks_child.load(path))
    if begin in namespace:
        namespace[begin]()
    else:
        init_process_group(begin)
    results = checks.run(namespace)
    dist.barrier()
    for folder in checks.folders if dist.get_rank() == 0 else ():
        shutil.rmtree(folder, ignore_errors=True)
    destroy_process_group()
    assert not is_initialized()
    return results
