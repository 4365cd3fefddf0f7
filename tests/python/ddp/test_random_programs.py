"""What scripts do to a model and its gradients, in any order: after each, what torch's DDP has.

At two ranks, bit for bit (test_parity.py says why).
"""

import checks
from ddp_programs import ALONE, NOT_STATIC, assert_values_alike, run
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks as hooks

SEEDS = range(3)


def check_gradients_of_their_own():
    for seed in SEEDS:
        run(seed)


def check_gradients_in_buckets():
    for seed in SEEDS:
        run(seed, in_buckets=True)


def check_hooks():
    for seed in SEEDS:
        for hook in (hooks.allreduce_hook, hooks.fp16_compress_hook):
            run(seed, hook=hook)


def check_hooks_in_buckets():
    for seed in SEEDS:
        run(seed, in_buckets=True, hook=hooks.bf16_compress_hook)


def check_static_graph():
    for seed in SEEDS:
        run(seed, NOT_STATIC, static_graph=True)
        run(seed, NOT_STATIC, in_buckets=True, static_graph=True)


def check_unused_parameters():
    for seed in SEEDS:
        run(seed, without=ALONE, all_heads=False, find_unused_parameters=True)


def check_unused_parameters_in_buckets():
    for seed in SEEDS:
        for hook in (None, hooks.bf16_compress_hook):
            run(
                seed,
                without=ALONE,
                in_buckets=True,
                hook=hook,
                all_heads=False,
                find_unused_parameters=True,
            )


#: A sharing optimizer refuses parameters with other memory and steps with what is not averaged, and
#: counts the values of an element's owner, where others may have other ones.
NOT_SHARED = ["keep", "swap_data", "give", "write_buffer", "backward_without_sync"]
NOT_SHARED += ["backward_of_a_part"]


def check_shared_work():
    def make_optimizer(model):
        return libddp_optim().AdamW(model.parameters(), lr=0.05, shard_over=model)

    for seed in SEEDS:
        run(seed, NOT_SHARED, in_buckets=True, make_optimizer=make_optimizer)


def check_shared_gradients():
    def make_optimizer(model):
        return libddp_optim().AdamW(
            model.parameters(), lr=0.05, shard_over=model, shard_gradients=True
        )

    def compare(ours, theirs, after):
        # What a second pass adds to an average is added in another order.
        assert_values_alike(ours, theirs, after, rtol=1e-3, atol=1e-4)

    for seed in SEEDS:
        run(seed, NOT_SHARED, True, make_optimizer, compare)


def libddp_optim():
    from libddp import optim

    return optim


results, test_on_two_ranks = checks.suite(globals(), 2)
