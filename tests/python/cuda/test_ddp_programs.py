"""What scripts do to a model on the fake device, in any order: after each, what torch's DDP has on
the CPU, bit for bit at two ranks; and no races.
"""

import ddp_programs
import fakegpu
import pytest
import ranks
from ddp_programs import ALONE, NOT_STATIC
from device_models import place
from libddp.distributed import init_process_group
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks as hooks

pytestmark = pytest.mark.skipif(fakegpu.missing() is not None, reason=str(fakegpu.missing()))

UNUSED = {"find_unused_parameters": True, "all_heads": False, "without": ALONE}
IN_BUCKETS = {"in_buckets": True}
KINDS = {
    "plain": {},
    "in buckets": IN_BUCKETS,
    "static graph": {"static_graph": True, "without": NOT_STATIC},
    "unused": UNUSED,
    "unused in buckets": UNUSED | IN_BUCKETS,
    "hook": {"hook": hooks.allreduce_hook},
    "compressed": {"hook": hooks.fp16_compress_hook},
    "compressed, unused in buckets": UNUSED | IN_BUCKETS | {"hook": hooks.fp16_compress_hook},
}


def programs(options):
    fakegpu.load()  # before the group, so that hooks reduce its tensors
    init_process_group(None)
    device = place(fakegpu.NAME)
    for seed in range(3):
        ddp_programs.run(seed, device=device, **options)
        assert fakegpu.races() == []


@pytest.mark.parametrize("kind", KINDS)
def test_random_programs(kind):
    ranks.run(programs, 2, KINDS[kind])
