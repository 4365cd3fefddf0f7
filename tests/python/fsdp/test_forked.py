"""A data loader's workers, forked from a rank: they read its memory, what they write is theirs."""

import checks
import ddp_models
import fsdp_models as models
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset


class Overwrites(Dataset):
    """Each item is the tensors' sum as a worker finds it; then the worker overwrites them."""

    def __init__(self, tensors):
        self.tensors = tensors

    def __len__(self):
        return 4

    def __getitem__(self, index):
        total = sum(t.double().sum() for t in self.tensors)
        for tensor in self.tensors:
            tensor.fill_(1000.0)
        return total


def workers_keep_to_themselves(tensors):
    tensors = [t.to_local() if hasattr(t, "to_local") else t for t in tensors]
    tensors = [t.detach() for t in tensors]
    before = [t.clone() for t in tensors]
    expected = sum(t.double().sum() for t in before)
    dist.barrier()
    workers = DataLoader(
        Overwrites(tensors), num_workers=4, multiprocessing_context="fork", timeout=60
    )
    assert [item.item() for item in workers] == [expected.item()] * 4
    dist.barrier()  # those of the other rank have written too
    for tensor, value in zip(tensors, before, strict=True):
        assert torch.equal(tensor, value)


def fork_workers(model):
    workers_keep_to_themselves(model.parameters())


def check_sharded_parameters():
    for wrap in (models.wrap, models.shard):
        expected = models.train(wrap(), 4)
        model = wrap()
        assert models.train(model, 4, each_step=fork_workers) == expected


def check_gradients_in_buckets():
    model = ddp_models.wrap(models.build())
    model(models.tokens(0))[1].backward()
    workers_keep_to_themselves([p.grad for p in model.parameters()])


def check_optimizer_state_that_ranks_share():
    from libddp.optim import AdamW

    model = ddp_models.wrap(models.build())
    optimizer = AdamW(model.parameters(), lr=0.1, shard_over=model)
    models.train(model, 2, make_optimizer=lambda _: optimizer)
    fork_workers(model)


results, test_on_all_ranks = checks.suite(globals(), 2)
