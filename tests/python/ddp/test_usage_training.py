"""Ways to train: optimizers, averages of weights, clipping, loss scaling, accumulation."""

import contextlib
import copy
import itertools

import checks
import pytest
import torch
import torch.distributed as dist
from ddp_models import ConvNet, Mlp
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from usage import (
    assert_agree,
    compare,
    data,
    gradients,
    ours,
    parameters,
    seed,
    theirs,
    train,
)


def whole_batch(mine: torch.Tensor) -> torch.Tensor:
    """The rows of all ranks."""
    parts = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, mine)
    return torch.cat(parts)


def lbfgs(model, batch, mean_over_ranks):
    """Calls the closure several times per step; every rank must see the same loss."""
    num_calls = 0
    optimizer = torch.optim.LBFGS(
        model.parameters(), lr=0.5, max_iter=6, line_search_fn="strong_wolfe"
    )

    def closure():
        nonlocal num_calls
        num_calls += 1
        optimizer.zero_grad()
        loss = (model(batch) - batch).pow(2).mean()
        loss.backward()
        return mean_over_ranks(loss.detach())

    for _ in range(3):
        optimizer.step(closure)
    assert num_calls > 6
    return parameters(model)


def average(loss):
    dist.all_reduce(loss)
    return loss / dist.get_world_size()


def lbfgs_on_two_ranks(wrap):
    model = wrap(Mlp(2).double())
    return lbfgs(model, data(8, dtype=torch.float64), average)


def check_lbfgs():
    trained = compare(lbfgs_on_two_ranks)
    assert_agree(trained)
    seed()
    plain = ours(Mlp(2).double()).module  # rank 0's values
    alone = lbfgs(plain, whole_batch(data(8, dtype=torch.float64)), lambda loss: loss)
    # Sums over a batch in two halves round differently.
    torch.testing.assert_close(trained, alone, rtol=1e-6, atol=1e-9)


def ema_of_the_inner_module(wrap):
    model = wrap(ConvNet(), broadcast_buffers=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ema = AveragedModel(model.module, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.randn(2, 3, 5, 5)).pow(2).mean().backward()
        optimizer.step()
        ema.update_parameters(model.module)
    with torch.no_grad():
        outputs = ema(torch.ones(1, 3, 5, 5))
    return parameters(model), parameters(ema), outputs


def check_ema_of_the_inner_module():
    trained, averaged, _ = compare(ema_of_the_inner_module)
    assert_agree(trained + averaged)


def check_ema_of_the_wrapped_model():
    model = ours(Mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    averages = [AveragedModel(model), AveragedModel(model.module)]
    for _ in range(3):
        train(model, optimizer, steps=1)
        for ema, source in zip(averages, (model, model.module), strict=True):
            ema.update_parameters(source)
    assert all(map(torch.equal, *map(parameters, averages)))
    assert not torch.equal(parameters(averages[0])[0], parameters(model)[0])
    if dist.get_rank() == 0:  # evaluation is local
        with torch.no_grad():
            averages[0](data(2))
    assert_agree(parameters(averages[0]))


def clipped(wrap, clip):
    model = wrap(Mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    norms = []
    for _ in range(3):
        optimizer.zero_grad()
        (model(data(4)).pow(2).sum() * (1 + dist.get_rank())).backward()
        norms.append(clip(model.parameters()))
        optimizer.step()
    return norms, gradients(model), parameters(model)


def by_norm(max_norm, **options):
    return lambda parameters: nn.utils.clip_grad_norm_(parameters, max_norm, **options)


def check_clipping():
    for clip in (by_norm(0.1), by_norm(0.1, foreach=True), by_norm(0.2, norm_type=float("inf"))):
        norms, clipped_gradients, _ = compare(clipped, clip)
        assert all(norm > 0.2 for norm in norms)
        assert_agree(norms + clipped_gradients)
    _, clipped_gradients, _ = compare(
        clipped, lambda parameters: nn.utils.clip_grad_value_(parameters, 0.01)
    )
    assert max(g.abs().max() for g in clipped_gradients) <= 0.01
    for wrap in (theirs, ours):
        with pytest.raises(RuntimeError, match="non-finite"):
            clipped(wrap, nan_norm)


def nan_norm(parameters):
    parameters = list(parameters)
    parameters[0].grad.fill_(float("nan"))
    return nn.utils.clip_grad_norm_(parameters, 1.0, error_if_nonfinite=True)


def scaled(wrap):
    """In the second of five steps rank 1 alone has an infinite loss."""
    model = wrap(Mlp())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    history = []
    for step in range(5):
        optimizer.zero_grad()
        loss = model(data(4)).pow(2).mean()
        if step == 1 and dist.get_rank() == 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        history.append((scaler.get_scale(), parameters(model)))
    return history


def check_inf_on_one_rank_skips_the_step_on_all():
    history = compare(scaled)
    assert [scale for scale, _ in history] == [1024.0, 512.0, 512.0, 1024.0, 1024.0]
    values = [values for _, values in history]
    assert all(map(torch.equal, values[0], values[1]))
    for before, after in itertools.pairwise(values[1:]):
        assert not any(map(torch.equal, before, after))
    assert_agree(values[-1])


def grouped(wrap, split, wrap_first):
    net = Mlp()
    model = wrap(net) if wrap_first else net
    optimizer = torch.optim.AdamW(split(model), lr=0.05)
    model = model if wrap_first else wrap(net)
    train(model, optimizer)
    return parameters(model)


def by_name(model):
    named = list(model.named_parameters())
    decayed = [p for name, p in named if not name.endswith("bias")]
    plain = [p for name, p in named if name.endswith("bias")]
    return [{"params": decayed, "weight_decay": 0.5}, {"params": plain, "weight_decay": 0.0}]


def by_dim(model):
    return [
        {"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": 0.5},
        {"params": [p for p in model.parameters() if p.dim() < 2], "lr": 0.01},
    ]


def check_optimizers_with_groups_before_and_after_wrapping():
    for split in (by_name, by_dim):
        # AdamW before wrapping holds the same parameter objects, so the order does not matter.
        before, after = compare(grouped, split, False), compare(grouped, split, True)
        assert all(map(torch.equal, before, after))
        assert_agree(after)


def accumulated(wrap, batch):
    model = wrap(Mlp().double(), bucket_cap_mb=0.003)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    for _ in range(3):
        optimizer.zero_grad(set_to_none=False)
        micro_batches = batch.chunk(4)
        for i, micro_batch in enumerate(micro_batches):
            is_last = i + 1 == len(micro_batches)
            with contextlib.nullcontext() if is_last else model.no_sync():
                loss = model(micro_batch).pow(2).mean() / len(micro_batches)
                loss.backward()
        optimizer.step()
    return parameters(model)


def check_accumulation_equals_a_big_batch():
    batch = torch.randn(8, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    mine = batch[dist.get_rank() :: 2]
    trained = compare(accumulated, mine)
    assert_agree(trained)
    seed()
    plain = ours(Mlp().double()).module
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.5, momentum=0.9)
    for _ in range(3):
        optimizer.zero_grad()
        plain(batch).pow(2).mean().backward()
        optimizer.step()
    torch.testing.assert_close(trained, parameters(plain), rtol=1e-12, atol=1e-14)


def evaluated_in_between(wrap, context):
    model = wrap(ConvNet())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    outputs = []
    for _ in range(4):
        with context():
            outputs.append(model(torch.randn(2, 3, 5, 5)))
        optimizer.zero_grad()
        model(torch.randn(2, 3, 5, 5)).pow(2).mean().backward()
        optimizer.step()
    return outputs, model.state_dict()


def check_forwards_without_gradients_in_between():
    for context in (torch.no_grad, torch.inference_mode):
        compare(evaluated_in_between, context)


def evaluated_with_gradients(wrap):
    """eval() forwards that are never, or only later, followed by a backward."""
    model = wrap(ConvNet())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    outputs = []
    for step in range(4):
        model.eval()
        outputs.append(model(torch.randn(2, 3, 5, 5)).detach())
        model.train(step % 2 == 0)
        optimizer.zero_grad()
        model(torch.randn(2, 3, 5, 5)).pow(2).mean().backward()
        optimizer.step()
    return outputs, model.state_dict()


def check_eval_forwards_with_gradients():
    compare(evaluated_with_gradients)


def check_a_schedule_and_the_optimizers_state():
    def warm_up(wrap):
        model = wrap(Mlp())
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=6)
        states = []
        for _ in range(6):
            train(model, optimizer, steps=1)
            schedule.step()
            states.append(copy.deepcopy(optimizer.state_dict()["state"]))
        return states

    compare(warm_up)


results, test_equals_torch = checks.suite(globals(), 2)
