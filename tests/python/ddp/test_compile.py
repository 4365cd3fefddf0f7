"""torch.compile inside and around DistributedDataParallel: graphs cut at buckets, same numbers."""

import copy
import os

import checks
import ddp_models as models
import pytest
import torch
from ddp_models import is_equal_on_all_ranks, wrap
from torch.nn.parallel import DistributedDataParallel as TorchDDP

RANK = int(os.environ.get("RANK", 0))
WIDTH = 512  # a layer is 1 MiB and 2 KiB
CAP_MB = 2


def x():
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(30 + RANK))


def train(model, steps=4):
    """Losses, and whether all ranks have the same weights in the end."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(x()).pow(2).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert all(is_equal_on_all_ranks(p) for p in model.parameters())
    return losses


class Counting:
    """A backend that runs graphs as they are, and counts them."""

    def __init__(self):
        self.num_graphs = 0

    def __call__(self, graph, inputs):
        self.num_graphs += 1
        return graph.forward


def check_a_compiled_module_is_cut_at_buckets():
    net = models.Mlp(width=WIDTH)
    expected = train(wrap(copy.deepcopy(net), bucket_cap_mb=CAP_MB))
    torch._dynamo.reset()
    backend = Counting()
    twin = copy.deepcopy(net)
    model = wrap(torch.compile(net, backend=backend), bucket_cap_mb=CAP_MB)
    assert train(model) == expected
    assert backend.num_graphs > 1
    torch._dynamo.reset()
    torchs = Counting()
    model = TorchDDP(
        torch.compile(twin, backend=torchs), bucket_cap_mb=CAP_MB, process_group=models.gloo()
    )
    assert train(model) == expected
    assert backend.num_graphs == torchs.num_graphs


def check_small_models_and_small_buckets():
    """dynamo cuts pieces of 1 MiB or more; torch's class cannot be compiled with smaller buckets"""
    for width, is_cut in ((16, False), (WIDTH, True)):
        torch._dynamo.reset()
        net = models.Mlp(width=width)
        data = torch.ones(2, width)
        backend = Counting()
        model = wrap(torch.compile(net, backend=backend), bucket_cap_mb=0.001)
        model(data).sum().backward()
        assert (backend.num_graphs > 1) == is_cut
        assert is_equal_on_all_ranks(net.layers[0].weight.grad)


def check_a_wrapped_model_may_be_compiled():
    net = models.Mlp(width=WIDTH)
    expected = train(wrap(copy.deepcopy(net), bucket_cap_mb=CAP_MB))
    for compiled in (lambda m, b: torch.compile(m, backend=b), compiled_in_place):
        torch._dynamo.reset()
        backend = Counting()
        model = compiled(wrap(copy.deepcopy(net), bucket_cap_mb=CAP_MB), backend)
        assert train(model) == expected
        assert backend.num_graphs > 1


def compiled_in_place(model, backend):
    model.compile(backend=backend)
    return model


def check_buffers_and_accumulation_when_compiled():
    class Counter(models.Mlp):
        def __init__(self):
            super().__init__(width=WIDTH)
            self.register_buffer("count", torch.zeros(()))

        def forward(self, value):
            self.count += RANK + 1
            return super().forward(value)

    torch._dynamo.reset()
    model = wrap(Counter())
    compiled = torch.compile(model, backend="eager")
    compiled(x()).sum().backward()
    with torch.no_grad():
        compiled(x())
    assert model.module.count.item() == 1 + RANK + 1  # rank 0's, and this rank's step
    model.zero_grad()
    with model.no_sync():
        compiled(x()).sum().backward()
    assert not is_equal_on_all_ranks(model.module.layers[0].weight.grad)
    compiled(x()).sum().backward()
    assert is_equal_on_all_ranks(model.module.layers[0].weight.grad)


def check_autograd_graphs_of_the_compiler():
    net = models.Mlp(width=WIDTH)
    expected = train(wrap(copy.deepcopy(net), bucket_cap_mb=CAP_MB))
    torch._dynamo.reset()
    model = wrap(torch.compile(net, backend="aot_eager"), bucket_cap_mb=CAP_MB)
    torch.testing.assert_close(train(model), expected)


def check_the_active_module():
    ddp_class = models.drop_in_ddp()
    seen = []

    class Asks(models.Mlp):
        def forward(self, value):
            seen.append((ddp_class._get_active_ddp_module(), ddp_class._active_ddp_module))
            return super().forward(value)

    inner = models.wrap_in_torchs_place(Asks())
    outer = models.wrap_in_torchs_place(torch.nn.Sequential(inner.module, Asks()))
    outer.module[0] = inner
    outer(torch.ones(2, 16))
    assert seen == [(inner, inner), (outer, outer)]
    assert ddp_class._get_active_ddp_module() is None
    with pytest.raises(TypeError):
        outer(None)
    assert ddp_class._get_active_ddp_module() is None
    with inner._inside_ddp_forward():
        assert torch.nn.parallel.DistributedDataParallel._get_active_ddp_module() is inner
    assert inner._active_ddp_module is None


results, test_on_every_rank = checks.suite(globals(), 2)
