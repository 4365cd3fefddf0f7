"""Training under libddp equals training under torch's DDP on Gloo, bit for bit, at two ranks.

Two is the world size at which dividing before or after the sum is the same in binary floating
point; from three ranks on torch itself depends on the order of its sums.
"""

import contextlib

import checks
import ddp_models as models
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as TorchDDP

STEPS = 50


def build(make_model):
    torch.manual_seed(17 + dist.get_rank())  # both libraries start from rank 0's values
    return make_model()


def train(ddp_class, make_model, loss_of, optimizer_class=torch.optim.AdamW, each_step=None, **ddp):
    """The model after 50 steps; every rank and step has data of its own."""
    group = {"process_group": models.gloo()} if ddp_class is TorchDDP else {}
    model = ddp_class(build(make_model), **group, **ddp)
    optimizer = optimizer_class(model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(100 + dist.get_rank())
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=step % 3 != 2)
        loss_of(model, generator, step)
        if each_step:
            each_step(model)
        optimizer.step()
    return model.module


def compare(*arguments, **options):
    ours = train(models.libddp_ddp(), *arguments, **options)
    theirs = train(TorchDDP, *arguments, **options)
    first = [p.detach().clone() for p in ours.parameters()]
    for tensor in first:
        dist.broadcast(tensor, 0)
    assert all(map(torch.equal, ours.parameters(), first)), "a rank has drifted away"
    theirs = theirs.state_dict()
    for name, value in ours.state_dict().items():
        assert torch.equal(value, theirs[name]), name


def token_loss(model, generator, step):
    model(torch.randint(11, (3, 5), generator=generator))[1].backward()


def mlp_loss(model, generator, step):
    model(torch.randn(4, 16, generator=generator)).pow(2).mean().backward()


def check_tied_weights_and_tuple_outputs():
    compare(models.TiedLanguageModel, token_loss)


def check_many_buckets():
    compare(lambda: models.Mlp(6, 64), wide_loss, bucket_cap_mb=0.02)


def wide_loss(model, generator, step):
    model(torch.randn(4, 64, generator=generator)).pow(2).mean().backward()


def check_batch_norm_buffers_and_channels_last():
    def loss(model, generator, step):
        model(torch.randn(2, 3, 5, 5, generator=generator)).pow(2).mean().backward()

    compare(models.ConvNet, loss)


def check_frozen_parameters_and_momentum():
    def sgd(parameters, lr):
        return torch.optim.SGD(parameters, lr=lr, momentum=0.9)

    compare(lambda: models.Mlp(frozen=2), mlp_loss, sgd)


def check_gradient_accumulation():
    def loss(model, generator, step):
        for micro_step in range(3):
            model.require_backward_grad_sync = micro_step == 2
            mlp_loss(model, generator, step)

    compare(models.Mlp, loss)


def check_no_sync():
    def loss(model, generator, step):
        for micro_step in range(2):
            with model.no_sync() if micro_step == 0 else contextlib.nullcontext():
                mlp_loss(model, generator, step)

    compare(models.Mlp, loss)


def check_unused_parameters():
    def loss(model, generator, step):
        head = (step + dist.get_rank() * (step % 2)) % 3
        model(torch.randn(2, 4, generator=generator), head).pow(2).mean().backward()

    compare(models.Heads, loss, find_unused_parameters=True)


def check_clipping():
    def clip(model):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)

    compare(models.Mlp, mlp_loss, each_step=clip)


def check_autocast():
    def loss(model, generator, step):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            value = model(torch.randn(4, 16, generator=generator)).pow(2).mean()
        value.backward()

    compare(models.Mlp, loss)


def check_static_graph():
    compare(models.Mlp, mlp_loss, static_graph=True)


results, test_equals_torch = checks.suite(globals(), 2)
