"""Sparse gradients: torch's numbers, its hooks and optimizers, on two and three ranks.

At two ranks training equals torch's DDP on Gloo bit for bit: both coalesce a rank's entries, add
rank 1's to rank 0's, and halve. At three, and against one process with the whole batch, the order
of the additions differs: compared in float64, to 1e-12.
"""

import contextlib
import os

import checks
import pytest
import ranks
import torch
import torch.distributed as dist
from ddp_models import gloo, libddp_ddp
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel as TorchDDP

RANK = int(os.environ.get("RANK", 0))
STEPS = 6
WORDS = 20


class Bags(nn.Module):
    """Two sparse tables and a dense one, in front of a linear layer."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.words = nn.Embedding(WORDS, 4, sparse=True, dtype=dtype)
        self.bags = nn.EmbeddingBag(WORDS, 4, mode="sum", sparse=True, dtype=dtype)
        self.plain = nn.Embedding(WORDS, 4, dtype=dtype)
        self.out = nn.Linear(4, 1, dtype=dtype)

    def forward(self, tokens, with_bags=True):
        hidden = self.words(tokens).sum(1) + self.plain(tokens).sum(1)
        if with_bags:
            hidden = hidden + self.bags(tokens)
        return self.out(torch.tanh(hidden))

    def tables(self):
        return [self.words.weight, self.bags.weight]


class Optimizers:
    """SparseAdam or SGD for the tables, SGD for the rest."""

    def __init__(self, net, sparse_class):
        tables = net.tables()
        rest = [p for p in net.parameters() if all(p is not table for table in tables)]
        lr = 0.1 if sparse_class is torch.optim.SGD else 0.02
        self.parts = [sparse_class(tables, lr=lr), torch.optim.SGD(rest, lr=0.1)]

    def step(self):
        for part in self.parts:
            part.step()

    def zero_grad(self):
        for part in self.parts:
            part.zero_grad()


def batch(step, rank):
    """Tokens [4, 3 + step % 2]: another number of entries, rank and step; words come twice."""
    generator = torch.Generator().manual_seed(1000 * rank + step)
    tokens = torch.randint(WORDS, (4, 3), generator=generator)
    tokens[0] = 7 + rank
    return tokens


def train(ddp_class, sparse_class=torch.optim.SGD, register=None, loss=None, dtype=None, **options):
    """The model after a few steps; checks that the tables' gradients are sparse on the way."""
    torch.manual_seed(5)
    group = {"process_group": gloo()} if ddp_class is TorchDDP else {}
    net = Bags(dtype or torch.float32)
    model = ddp_class(net, **group, **options)
    if register:
        register(model, group.get("process_group"))
    optimizers = Optimizers(net, sparse_class)
    for step in range(STEPS):
        optimizers.zero_grad()
        if loss:
            loss(model, step)
        else:
            model(batch(step, dist.get_rank())).pow(2).mean().backward()
        assert all(table.grad.is_sparse for table in net.tables())
        optimizers.step()
    if ddp_class is not TorchDDP:
        assert all(table.grad.is_coalesced() for table in net.tables())
    return net.state_dict()


def train_alone(sparse_class, world_size, dtype=torch.float32):
    """The same steps in one process, with all ranks' batches together."""
    torch.manual_seed(5)
    net = Bags(dtype)
    optimizers = Optimizers(net, sparse_class)
    for step in range(STEPS):
        optimizers.zero_grad()
        whole = torch.cat([batch(step, rank) for rank in range(world_size)])
        net(whole).pow(2).mean().backward()
        optimizers.step()
    return net.state_dict()


def assert_ranks_agree(tensors):
    for tensor in tensors:
        first = tensor.detach().to_dense().clone()
        dist.broadcast(first, 0)
        assert torch.equal(first, tensor.detach().to_dense())


def compare(**options):
    ours = train(libddp_ddp(), **options)
    assert_ranks_agree(ours.values())
    theirs = train(TorchDDP, **options)
    for name, value in theirs.items():
        assert torch.equal(ours[name], value), name


def assert_close(ours, theirs, tolerance):
    assert_ranks_agree(ours.values())
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=tolerance, atol=tolerance, msg=name)


def check_sgd_and_sparse_adam_equal_torch():
    for dtype in (torch.float32, torch.float64):
        compare(sparse_class=torch.optim.SGD, dtype=dtype)
        compare(sparse_class=torch.optim.SparseAdam, dtype=dtype)


def check_one_process_with_the_whole_batch():
    for optimizer in (torch.optim.SGD, torch.optim.SparseAdam):
        ours = train(libddp_ddp(), sparse_class=optimizer, dtype=torch.float64)
        assert_close(ours, train_alone(optimizer, 2, torch.float64), 1e-12)


def check_accumulation_equals_torch():
    def loss(model, step):
        for micro_step in range(3):
            with model.no_sync() if micro_step < 2 else contextlib.nullcontext():
                model(batch(10 * step + micro_step, RANK)).pow(2).mean().backward()

    compare(loss=loss)


def check_torchs_hooks_see_sparse_buckets():
    compare(
        register=lambda model, group: model.register_comm_hook(group, default_hooks.allreduce_hook)
    )
    kinds = dist.BuiltinCommHookType
    compare(register=lambda model, group: model._register_builtin_comm_hook(kinds.ALLREDUCE))
    sparse_class = torch.optim.SparseAdam
    ours = train(
        libddp_ddp(),
        sparse_class,
        lambda model, group: model.register_comm_hook(None, default_hooks.fp16_compress_hook),
    )
    # fp16 keeps 11 bits of each gradient; SparseAdam's steps are 0.02.
    assert_close(ours, train(libddp_ddp(), sparse_class), 0.05)
    in_cpp = train(libddp_ddp(), register=lambda model, _: model.compress_gradients(torch.float16))
    assert_close(in_cpp, train(libddp_ddp()), 0.01)


def check_what_a_hook_is_given():
    seen = []

    def hook(state, bucket):
        tensor = bucket.buffer()
        seen.append((bucket.index(), bucket.is_last(), tensor.is_sparse, len(bucket.parameters())))
        return default_hooks.allreduce_hook(state, bucket)

    net = Bags()
    model = libddp_ddp()(net, find_unused_parameters=True)
    model.register_comm_hook(None, hook)
    # Nobody uses the bags, and rank 1 uses nothing sparse at all.
    model(batch(0, RANK), with_bags=False).sum().backward()
    assert seen == [(0, False, False, 3), (1, False, True, 1), (2, True, True, 1)]
    assert net.bags.weight.grad is None
    assert_ranks_agree([net.words.weight.grad])


def check_optimizers_in_the_backward_pass():
    from torch.distributed.optim import _apply_optimizer_in_backward

    torch.manual_seed(5)
    net = Bags()
    _apply_optimizer_in_backward(torch.optim.SGD, net.parameters(), {"lr": 0.1})
    model = libddp_ddp()(net)
    for step in range(STEPS):
        model(batch(step, RANK)).pow(2).mean().backward()
        assert all(parameter.grad is None for parameter in net.parameters())
    ours = net.state_dict()
    theirs = train(libddp_ddp())
    assert all(torch.equal(ours[name], value) for name, value in theirs.items())


def check_duplicates_uneven_entries_and_a_rank_with_few():
    net = nn.Embedding(6, 2, sparse=True)
    model = libddp_ddp()(net)
    tokens = torch.tensor([3, 3, 3, 1, 0]) if RANK == 0 else torch.tensor([3])
    for _ in range(2):
        net.weight.grad = None
        model(tokens).sum().backward()
        assert net.weight.grad.is_sparse
        assert net.weight.grad.is_coalesced()
        assert net.weight.grad.to_dense()[:, 0].tolist() == [0.5, 0.5, 0, 2, 0, 0]
    # Without clearing, the next average is added.
    model(tokens).sum().backward()
    assert net.weight.grad.to_dense()[:, 1].tolist() == [1, 1, 0, 4, 0, 0]


def check_a_rank_without_entries():
    net = nn.Embedding(6, 2, sparse=True)
    model = libddp_ddp()(net)
    tokens = torch.tensor([4, 2]) if RANK == 0 else torch.empty(0, dtype=torch.long)
    model(tokens).sum().backward()
    assert net.weight.grad.to_dense()[:, 0].tolist() == [0, 0, 0.5, 0, 0.5, 0]


def check_bf16_adds_in_fp32():
    net = nn.Embedding(3, 1, sparse=True, dtype=torch.bfloat16)
    model = libddp_ddp()(net)
    tokens = torch.full((256,) if RANK == 0 else (2,), 1)  # in bf16 256 + 1 is 256 again
    model(tokens).sum().backward()
    assert net.weight.grad.dtype is torch.bfloat16
    assert net.weight.grad.to_dense()[:, 0].tolist() == [0, 129, 0]


def check_unused_parameter_is_named_on_every_rank():
    model = libddp_ddp()(Bags())
    with pytest.raises(RuntimeError, match=r"1 of 5 parameters.*'bags.weight' \(rank 1\)"):
        model(batch(0, RANK), with_bags=RANK == 0).sum().backward()
    model.zero_grad()
    model(batch(0, RANK)).sum().backward()
    assert_ranks_agree([model.module.bags.weight.grad])


def check_find_unused_and_static_graph():
    for options in ({"find_unused_parameters": True}, {"static_graph": True}):
        net = Bags()
        net.never = nn.Embedding(3, 1, sparse=True)
        model = libddp_ddp()(net, **options)
        for _ in range(3):
            model.zero_grad()
            model(batch(0, RANK), with_bags=RANK == 0).sum().backward()
            assert net.never.weight.grad is None
            assert_ranks_agree([net.bags.weight.grad])
            assert net.bags.weight.grad.to_dense().abs().sum() > 0


def check_tied_weights_are_averaged_densely():
    net = Bags()
    net.head = nn.Linear(4, WORDS, bias=False)
    net.head.weight = net.words.weight
    model = libddp_ddp()(net, find_unused_parameters=True)
    for step in range(3):
        model.zero_grad()
        loss = model(batch(step, RANK)).sum()
        if RANK == 0:
            loss = loss + net.head.weight.sum()  # on one rank only
        loss.backward()
        assert not net.words.weight.grad.is_sparse
        assert_ranks_agree([net.words.weight.grad])


def check_join():
    for divide, last_step in ((True, 0.5), (False, 1.0)):
        net = nn.Embedding(4, 1, sparse=True)
        nn.init.zeros_(net.weight)
        model = libddp_ddp()(net)
        optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
        with model.join(divide_by_initial_world_size=divide):
            for _ in range(1 + RANK):
                optimizer.zero_grad()
                model(torch.tensor([RANK, 3])).sum().backward()
                optimizer.step()
        expected = [-0.5, -0.5 - last_step, 0, -1 - last_step]
        assert net.weight[:, 0].tolist() == expected


results, test_on_every_rank = checks.suite(globals(), 2)


def three_ranks():
    from libddp.distributed import destroy_process_group, init_process_group

    init_process_group("libddp")
    for optimizer in (torch.optim.SGD, torch.optim.SparseAdam):
        ours = train(libddp_ddp(), sparse_class=optimizer, dtype=torch.float64)
        assert_close(ours, train(TorchDDP, sparse_class=optimizer, dtype=torch.float64), 1e-12)
        assert_close(ours, train_alone(optimizer, 3, torch.float64), 1e-12)
    destroy_process_group()


def test_three_ranks_agree_with_torch_and_with_one_process():
    ranks.run(three_ranks, 3)
