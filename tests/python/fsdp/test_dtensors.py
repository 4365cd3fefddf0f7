"""After fully_shard parameters, gradients and optimizer states are DTensors, as in FSDP2."""

import copy
import io
import itertools
import math
import sys

import checks
import fsdp_models as models
import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

ORDERS = (2.0, 1.0, math.inf, 3)


def one_pass(model, step=0):
    model(models.tokens(step))[1].backward()
    return model


def assert_alike(mine, other):
    """The same DTensor, to the bit."""
    assert isinstance(mine, DTensor)
    assert mine.placements == other.placements
    assert mine.device_mesh.shape == other.device_mesh.shape
    assert (mine.shape, mine.stride(), mine.dtype) == (other.shape, other.stride(), other.dtype)
    assert torch.equal(mine.to_local(), other.to_local())


def assert_models_alike(ours, theirs):
    for (name, mine), (wanted, other) in zip(
        ours.named_parameters(), theirs.named_parameters(), strict=True
    ):
        assert name == wanted
        assert isinstance(mine, torch.nn.Parameter)
        assert_alike(mine, other)
        assert (mine.grad is None) == (other.grad is None)
        if mine.grad is not None:
            assert_alike(mine.grad, other.grad)


def both():
    return models.shard(), models.theirs()


def check_parameters_and_gradients_are_torchs():
    ours, theirs = both()
    assert_models_alike(ours, theirs)
    for step in range(3):  # gradients add up
        assert_models_alike(one_pass(ours, step), one_pass(theirs, step))
    for model in (ours, theirs):
        model.zero_grad()
    assert_models_alike(one_pass(ours), one_pass(theirs))


def check_steps_show_gradients_in_cpp():
    ours = models.shard()
    for step in range(2):  # the first one makes the DTensors
        one_pass(ours, step).zero_grad()
    called = set()

    def note(frame, event, _):
        if event == "call":
            called.add(frame.f_code.co_filename.rpartition("/")[2])

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        one_pass(ours).zero_grad()
    finally:
        sys.setprofile(before)
    assert "_wrapped_module.py" in called
    assert not called & {"_faces.py", "_sharded_param.py"}


def check_a_mesh_of_two_dimensions():
    mesh = dist.init_device_mesh(
        "cpu", (1, dist.get_world_size()), mesh_dim_names=("replicate", "shard")
    )
    assert_models_alike(models.shard(mesh=mesh), models.theirs(mesh=mesh))


def check_optimizer_states_are_torchs():
    from libddp.optim import AdamW

    theirs = models.theirs()
    other = torch.optim.AdamW(theirs.parameters(), lr=0.01, fused=True)
    wanted = models.train(theirs, 3, lambda _: other)
    for make in (AdamW, lambda p, lr: torch.optim.AdamW(p, lr=lr, fused=True)):
        ours = models.shard()
        optimizer = make(ours.parameters(), lr=0.01)
        assert models.train(ours, 3, lambda _, used=optimizer: used) == wanted
        for mine, their in zip(ours.parameters(), theirs.parameters(), strict=True):
            for key, value in other.state[their].items():
                found = optimizer.state[mine][key]
                if isinstance(value, DTensor):
                    assert_alike(found, value)
                else:
                    assert torch.equal(found, value)


def check_a_script_that_saves_whole_optimizer_states():
    """As the FSDP2 example of pytorch/examples does it, and resumes."""
    from torch.distributed.tensor import distribute_tensor

    from libddp.optim import AdamW

    def fused(parameters, lr):
        return torch.optim.AdamW(parameters, lr=lr, fused=True)

    def whole_state(model, optimizer):
        weights = {name: p.full_tensor() for name, p in model.state_dict().items()}
        state = optimizer.state_dict()
        moments = {
            index: {
                key: s.full_tensor() if isinstance(s, DTensor) else s.clone()
                for key, s in entries.items()
            }
            for index, entries in state["state"].items()
        }
        return weights, {"state": moments, "param_groups": state["param_groups"]}

    def resume(model, make_optimizer, weights, state):
        sharded = {
            name: torch.nn.Parameter(distribute_tensor(weights[name], p.device_mesh, p.placements))
            for name, p in model.state_dict().items()
        }
        model.load_state_dict(sharded, strict=False, assign=True)
        optimizer = make_optimizer(model.parameters(), lr=0.01)
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        moments = {
            index: {
                key: distribute_tensor(
                    s, parameters[index].device_mesh, parameters[index].placements
                )
                if s.dim() > 0
                else s
                for key, s in entries.items()
            }
            for index, entries in state["state"].items()
        }
        optimizer.load_state_dict({**state, "state": moments})
        return optimizer

    def build(seed=17):
        """torch unties what load_state_dict(assign=True) replaces."""
        model = models.build(seed=seed)
        model.head.weight = torch.nn.Parameter(model.head.weight.detach().clone())
        return model

    def run(make, make_optimizer):
        model = make(build())
        optimizer = make_optimizer(model.parameters(), lr=0.01)
        models.train(model, 2, lambda _: optimizer)
        saved = whole_state(model, optimizer)
        again = make(build(seed=5))
        other = resume(again, make_optimizer, *saved)
        losses = models.train(again, 2, lambda _: other, first=2)
        assert losses == models.train(model, 2, lambda _: optimizer, first=2)
        return saved[0], losses

    wanted, losses = run(models.theirs, fused)
    for make_optimizer in (AdamW, fused):
        found, ours = run(models.shard, make_optimizer)
        assert ours == losses
        for name, value in wanted.items():
            assert torch.equal(found[name], value), name


def check_norms_are_torchs():
    for order in ORDERS:
        ours, theirs = both()
        found, wanted = (
            torch.nn.utils.clip_grad_norm_(one_pass(model).parameters(), 0.1, order)
            for model in (ours, theirs)
        )
        assert torch.equal(found.full_tensor(), wanted.full_tensor())
        assert_models_alike(ours, theirs)


def check_gradients_of_a_scripts_own():
    def run(model):
        one_pass(model)
        for parameter in model.parameters():
            parameter.grad = parameter.grad * 10
        one_pass(model, 1)
        kept = [(p.grad, p.grad.full_tensor()) for p in model.parameters()]
        model.zero_grad()
        one_pass(model, 2)
        for gradient, whole in kept:
            assert torch.equal(gradient.full_tensor(), whole)
        return model

    assert_models_alike(run(models.shard()), run(models.theirs()))
    model = models.shard()
    with pytest.raises(RuntimeError, match="grad"):  # torch's own
        model.norm.weight.grad = torch.ones(3)


def check_values_of_a_scripts_own():
    """In place, through `.data`, under another object."""
    ours, theirs = both()
    for model in (ours, theirs):
        one_pass(model)
        with torch.no_grad():
            model.norm.weight.mul_(2)
            model.norm.bias.copy_(model.norm.weight)
            model.blocks[0].up.weight.to_local().add_(0.1)
            for p in model.blocks[1].parameters():
                p.sub_(p.grad, alpha=0.1)
        model.zero_grad()
    assert one_pass(ours).norm.weight.grad.norm().full_tensor() > 0
    one_pass(theirs)
    assert_models_alike(ours, theirs)


def check_parameters_in_the_loss():
    """L2 regularisation outside of any forward."""

    def run(model):
        for step in range(2):
            loss = model(models.tokens(step))[1]
            squares = [p.pow(2).sum() for p in model.parameters()]
            total = sum(s.full_tensor() if isinstance(s, DTensor) else s for s in squares)
            (loss + 0.1 * total).backward()
        return model

    ours, theirs = run(models.shard()), run(models.theirs())
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        # torch may add the two gradients in the other order
        torch.testing.assert_close(mine.grad.to_local(), other.grad.to_local())


def check_inside_of_a_forward():
    model, seen = models.shard(), []
    block = model.blocks[1]

    def look(*_):
        seen.extend((block.up.weight, model.norm.weight, model.blocks[0].up.weight))

    block.norm_1.register_forward_pre_hook(look)
    model(models.tokens(0))
    wanted = models.build()
    assert torch.equal(wanted.blocks[1].up.weight, seen[0].detach().new_tensor(whole(block)))
    assert [type(p) for p in seen] == [torch.nn.Parameter, torch.nn.Parameter, DTensor]
    assert isinstance(block.up.weight, DTensor)


def whole(block):
    return block.up.weight.full_tensor().tolist()


def check_unshard_and_reshard():
    ours, theirs, wanted = models.shard(), models.theirs(), models.build()
    for model in (ours, theirs):
        model.blocks[0].unshard()
        for name, parameter in model.blocks[0].named_parameters():
            assert type(parameter) is torch.nn.Parameter
            assert torch.equal(parameter, wanted.blocks[0].get_parameter(name))
        assert isinstance(model.norm.weight, DTensor)
        model.blocks[0].reshard()
        assert isinstance(model.blocks[0].up.weight, DTensor)
        model.unshard(async_op=True).wait()
        model.blocks[1].unshard()
        one_pass(model)
        for part in model.modules():
            if hasattr(part, "reshard"):
                part.reshard()
    assert_models_alike(ours, theirs)


def check_the_divisor_of_gradients():
    """torch on Gloo cannot divide by another number than that of the ranks."""
    for factor in (1.0, 8.0):
        ours, wanted = models.shard(), one_pass(models.shard())
        for part in (*ours.blocks, ours):
            part.set_gradient_divide_factor(factor)
        one_pass(ours)
        for mine, other in zip(ours.parameters(), wanted.parameters(), strict=True):
            ratio = dist.get_world_size() / factor
            assert torch.equal(mine.grad.to_local(), other.grad.to_local() * ratio)


def check_another_dtype():
    ours, theirs = both()
    one_pass(ours).zero_grad()  # torch's can be converted before the first forward only
    for model in (ours, theirs):
        model.to(torch.bfloat16)
        assert model.norm.weight.dtype == torch.bfloat16
    assert_models_alike(ours, theirs)
    losses = [models.train(model, 2) for model in (ours, theirs)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-2)  # bfloat16 sums in another order
    assert next(ours.parameters()).dtype == torch.bfloat16


def load_by_swapping(model):
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()})
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


CONVERSIONS = (
    lambda model: model.cpu(),
    lambda model: model.half().float(),
    lambda model: model.blocks[0].double().float(),
    load_by_swapping,
)


def gradients(model):
    return [p.grad for p in model.parameters() if p.grad is not None]


def halve_local_tensors(model):
    for gradient in gradients(model):
        gradient._local_tensor = gradient._local_tensor * 0.5


CHANGES = (
    lambda model: None,
    lambda model: model.zero_grad(set_to_none=False),
    lambda model: [gradient.mul_(0.5) for gradient in gradients(model)],
    lambda model: torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01),
    halve_local_tensors,
)


def check_gradients_that_live_over_a_conversion():
    for convert, change in itertools.product((lambda model: None, *CONVERSIONS), CHANGES):
        ours, theirs = both()
        for model in (ours, theirs):
            one_pass(model)
            convert(model)
            change(model)
            one_pass(model, 1)
        assert_models_alike(ours, theirs)


def check_hooks_that_live_over_a_conversion():
    for convert in CONVERSIONS:
        counts = []
        for model in both():
            calls = []
            parameter = model.blocks[0].up.weight
            handle = parameter.register_post_accumulate_grad_hook(calls.append)
            one_pass(model)
            convert(model)
            one_pass(model, 1)
            handle.remove()
            one_pass(model, 2)
            counts.append(len(calls))
        assert counts == [2, 2]


def check_waiting_gradients_are_averaged_at_the_end():
    ours, wanted = both()
    ours.set_manual_backward_finalization(True)
    for model in (ours, wanted):
        model.set_requires_gradient_sync(False)
        one_pass(model)
        model.set_requires_gradient_sync(model is ours)
    ours.finalize_backward()
    wanted.set_requires_gradient_sync(True)
    one_pass(wanted, 1)
    one_pass(ours, 1)
    for mine, other in zip(ours.parameters(), wanted.parameters(), strict=True):
        # averages of two passes are added here, the passes' sums are averaged there
        torch.testing.assert_close(mine.grad.to_local(), other.grad.to_local())


def longest(parameter):
    """Of weights the longer dimension."""
    from torch.distributed.tensor import Shard

    return Shard(-1) if parameter.dim() == 2 and parameter.shape[1] > parameter.shape[0] else None


def check_another_dimension_than_rows():
    ours = models.shard(shard_placement_fn=longest)
    theirs = models.theirs(shard_placement_fn=longest)
    assert any(p.placements[0].dim == 1 for p in ours.parameters())
    for step in range(2):
        one_pass(ours, step)
        one_pass(theirs, step)
        for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert mine.placements == other.placements
            assert torch.equal(mine.full_tensor(), other.full_tensor())
            assert torch.equal(mine.grad.full_tensor(), other.grad.full_tensor())
            assert mine.to_local().is_contiguous()
            assert mine.grad.to_local().is_contiguous()
    assert models.train(ours, 3) == models.train(theirs, 3)
    whole = models.build(seed=5).state_dict()
    ours.load_state_dict(whole)
    for name, value in ours.state_dict().items():
        assert torch.equal(value.full_tensor(), whole[name])
    on_meta = models.shard(models.on_meta(), shard_placement_fn=longest)
    on_meta.load_state_dict(whole)
    assert models.train(on_meta, 2) == models.train(ours, 2)
    replaced = models.shard(models.on_meta(), shard_placement_fn=longest)
    for name, value in theirs.state_dict().items():  # as load_state_dict(assign=True) of torch
        owner, _, key = name.rpartition(".")
        mesh, placements = value.device_mesh, value.placements
        value = DTensor.from_local(value.to_local().clone(), mesh, placements, run_check=False)
        replaced.get_submodule(owner).register_parameter(key, torch.nn.Parameter(value))
    replaced.head.weight = replaced.embedding.weight
    assert models.train(replaced, 2) == models.train(theirs, 2)
    with pytest.raises(ValueError, match=r"is cut on dim 1.*Hint: save the DTensors"):
        models.libddp_fsdp().save_snapshot(checks.shared_folder() / "s", ours)


def check_gradients_of_columns_are_what_scripts_make_of_them():
    ours = models.shard(shard_placement_fn=longest)
    theirs = models.theirs(shard_placement_fn=longest)

    def scale(parameter):
        parameter.grad.mul_(3)

    def replace(parameter):
        parameter.grad = parameter.grad * 3

    def clear(parameter):
        parameter.grad = None

    def zero(parameter):
        parameter.grad.zero_()

    def write(parameter):
        with torch.no_grad():
            parameter.to_local().view(-1).mul_(0.5)

    def write_data(parameter):
        parameter.data.mul_(0.5)

    for step, change in enumerate((scale, replace, scale, clear, zero, write, write_data, scale)):
        for model in (ours, theirs):
            one_pass(model, step)
            for parameter in model.parameters():
                change(parameter)
            one_pass(model, step + 1)
        for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(mine.grad.to_local(), other.grad.to_local())
            assert torch.equal(mine.to_local(), other.to_local())
            assert mine.grad.to_local().is_contiguous()
    with torch.no_grad():
        tokens = models.tokens(0)
        torch.testing.assert_close(ours(tokens), theirs(tokens))


def check_placements_that_cannot_be():
    from torch.distributed.tensor import Replicate, Shard

    fsdp = models.libddp_fsdp()
    with pytest.raises(NotImplementedError, match=r"dim 1 of parameter 'weight'.*divided evenly"):
        fsdp.fully_shard(torch.nn.Linear(3, 4), shard_placement_fn=lambda p: Shard(p.dim() - 1))
    for wrong in (Replicate(), Shard(5)):
        with pytest.raises(ValueError, match=r"shard_placement_fn gives .* for parameter"):
            fsdp.fully_shard(torch.nn.Linear(4, 4), shard_placement_fn=lambda _, w=wrong: w)
    with pytest.raises(ValueError, match="needs DTensors"):
        fsdp.fully_shard(torch.nn.Linear(4, 4), shard_placement_fn=longest, use_dtensor=False)
    with pytest.raises(
        ValueError, match=r"dp_mesh_dims is torch's DataParallelMeshDims, .* not a object"
    ):
        fsdp.fully_shard(torch.nn.Linear(4, 4), dp_mesh_dims=object())


def check_units_that_are_used_later():
    class Second(torch.nn.Sequential):
        def forward(self, x, which):
            return self[which](x)

    model = Second(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    for part in model:
        models.libddp_fsdp().fully_shard(part)
    models.libddp_fsdp().fully_shard(model)
    for which in (0, 1):
        model(torch.ones(1, 2), which).sum().backward()
        assert model[which].weight.grad.full_tensor().tolist() == [[1.0, 1.0], [1.0, 1.0]]


def check_files():
    model = one_pass(models.shard())
    for tensor in (model.norm.weight, model.norm.weight.grad):
        file = io.BytesIO()
        torch.save(tensor, file)
        file.seek(0)
        assert torch.equal(torch.load(file, weights_only=False).full_tensor(), tensor.full_tensor())


def check_refusals():
    fsdp = models.libddp_fsdp()
    with pytest.raises(RuntimeError, match=r"FSDPTinyGpt cannot be copied.*Hint: build a second"):
        copy.deepcopy(models.shard())
    for container in (torch.nn.ModuleList([torch.nn.Linear(2, 2)]), torch.nn.ModuleDict()):
        with pytest.raises(
            ValueError, match=rf"do not implement forward: {type(container).__name__}"
        ):
            fsdp.fully_shard(container)
    from libddp.nn.parallel import DistributedDataParallel

    with pytest.raises(ValueError, match=r"parameter 'embedding\.weight' is a DTensor"):
        DistributedDataParallel(models.shard())
    scalar = torch.nn.Module()
    scalar.p = torch.nn.Parameter(torch.ones(()))
    with pytest.raises(ValueError, match="'p' is a scalar"):
        fsdp.fully_shard(scalar)
    model = models.shard()
    model.norm.weight = torch.nn.Parameter(torch.ones(3))
    with pytest.raises(RuntimeError, match=r"'norm\.weight' was replaced.*Hint"):
        model(models.tokens(0))
    with pytest.raises(ValueError, match=r"cannot be divided by 0"):
        models.shard().set_gradient_divide_factor(0)


def check_compiled_modules():
    model = models.shard()
    compiled = torch.compile(model, backend="aot_eager")
    loss = compiled(models.tokens(0))[1]
    loss.backward()
    again = models.shard()
    torch.testing.assert_close(loss, again(models.tokens(0))[1])
    one_pass(again)
    for mine, other in zip(model.parameters(), again.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.full_tensor(), other.grad.full_tensor())


results, test_on_all_ranks = checks.suite(globals(), 2)
