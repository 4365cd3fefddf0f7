"""What scripts ask of DTensors works on our parameters, with the answers of torch's FSDP2."""

import copy
import io

import checks
import fsdp_models as models
import pytest
import torch
import torch.distributed as dist
from fsdp_states import narrow


def torchs(mesh=None, make_model=narrow):
    """Under torch's FSDP2, on Gloo."""
    return models.theirs(models.build(make_model), mesh=mesh)


def one_pass(model):
    model(models.tokens(0))[1].backward()
    return model


def check_whole_tensors_are_torchs():
    theirs = one_pass(torchs())
    for ours in (one_pass(models.shard(models.build(narrow))), models.wrap(models.build(narrow))):
        one_pass(ours)
        for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert torch.equal(mine.full_tensor(), other.full_tensor())
            assert mine.grad.full_tensor().shape == other.grad.full_tensor().shape
    theirs.zero_grad()
    ours = one_pass(models.shard(models.build(narrow)))
    one_pass(theirs)
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.full_tensor(), other.grad.full_tensor())


def check_mesh_and_placements():
    theirs = torchs()
    for ours in (models.shard(), models.wrap()):
        for mine, other in zip(ours.parameters(), theirs.parameters(), strict=False):
            assert mine.placements == other.placements
            assert mine.device_mesh.shape == other.device_mesh.shape
            assert mine.device_mesh.get_local_rank() == dist.get_rank()
    entry = models.shard().state_dict()["norm.weight"]
    assert (entry.placements, entry.device_mesh.ndim) == (mine.placements, 1)


def check_a_mesh_of_two_dimensions():
    mesh = dist.init_device_mesh(
        "cpu", (1, dist.get_world_size()), mesh_dim_names=("replicate", "shard")
    )
    theirs = next(torchs(mesh, models.TinyGpt).parameters())
    model = models.shard(mesh=mesh)
    for ours in (next(model.parameters()), model.state_dict()["norm.weight"]):
        assert ours.placements == theirs.placements
        assert ours.device_mesh is mesh
    assert torch.equal(model.norm.weight.full_tensor(), torch.ones(12))


def check_nothing_sharded():
    from torch.distributed.fsdp import ShardingStrategy
    from torch.distributed.tensor import Replicate

    model = one_pass(models.wrap(sharding_strategy=ShardingStrategy.NO_SHARD))
    for parameter in model.parameters():
        assert parameter.placements == (Replicate(),)
        assert torch.equal(parameter.full_tensor(), parameter)
        assert torch.equal(parameter.grad.full_tensor(), parameter.grad)


def check_local_parts_share_memory():
    model = one_pass(models.shard())
    parameter = model.embedding.weight
    for tensor in (parameter, parameter.grad):
        local = tensor.to_local()
        assert type(local) is torch.Tensor
        assert local.data_ptr() == tensor.data_ptr()
    with torch.no_grad():
        parameter.to_local().fill_(0.5)
    assert parameter.full_tensor().eq(0.5).all()
    assert not parameter.full_tensor().requires_grad


def check_inside_of_a_forward_and_of_summon():
    model = models.shard()
    seen = []

    def look(block, _):
        seen.append((block.up.weight.full_tensor(), model.norm.weight.full_tensor()))

    model.blocks[1].register_forward_pre_hook(lambda *_: None)
    model.blocks[1].norm_1.register_forward_pre_hook(lambda *_: look(model.blocks[1], _))
    model(models.tokens(0))
    wanted = models.build()
    assert torch.equal(seen[0][0], wanted.blocks[1].up.weight)
    assert torch.equal(seen[0][1], wanted.norm.weight)
    wrapped = models.wrap()
    with type(wrapped).summon_full_params(wrapped):
        assert torch.equal(wrapped.norm.weight.full_tensor(), wanted.norm.weight)


def check_gradients_over_several_passes():
    model = models.shard()
    plain = models.build()
    for step in range(3):
        for p in model.parameters():
            p.grad = None
        one_pass(model)
        for rank in range(dist.get_world_size()):
            generator = torch.Generator().manual_seed(rank)
            loss = plain(torch.randint(13, (2, 6), generator=generator))[1]
            (loss / dist.get_world_size()).backward()
        for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine.grad.full_tensor(), other.grad / (step + 1))


def check_kept_gradients_answer_for_themselves():
    for make in (models.shard, models.wrap):
        model = one_pass(make())
        kept = [(p.grad, p.grad.clone(), p.grad.full_tensor()) for p in model.parameters()]
        model.zero_grad()
        for gradient, _, whole in kept:
            assert torch.equal(gradient.full_tensor(), whole)
        model(models.tokens(1))[1].backward()
        for parameter, (gradient, values, whole) in zip(model.parameters(), kept, strict=True):
            assert parameter.grad is not gradient
            assert not torch.equal(parameter.grad.full_tensor(), whole)
            assert gradient.to_local() is gradient
            assert torch.equal(gradient, values)
            assert torch.equal(gradient.full_tensor(), whole)


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


def check_copies_and_files_are_plain():
    model = one_pass(models.shard())
    model.norm.weight.note = "mine"
    for tensor in (model.norm.weight, model.norm.weight.grad):
        file = io.BytesIO()
        torch.save(tensor, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=True)
        assert torch.equal(loaded, tensor)
        assert not hasattr(loaded, "full_tensor")
        assert hasattr(loaded, "note") == hasattr(tensor, "note")
        assert not hasattr(tensor.clone(), "full_tensor")
    assert not hasattr(copy.deepcopy(model.norm.weight), "full_tensor")
    copied = copy.deepcopy(model.norm.weight.grad)
    assert torch.equal(copied, model.norm.weight.grad)
    with pytest.raises(RuntimeError, match="belongs to no sharded model"):
        copied.full_tensor()


def check_compiled_modules():
    model = models.shard()
    compiled = torch.compile(model, backend="aot_eager")
    loss = compiled(models.tokens(0))[1]
    loss.backward()
    again = one_pass(models.shard())
    torch.testing.assert_close(loss, again(models.tokens(0))[1])
    for mine, other in zip(model.parameters(), again.parameters(), strict=True):
        assert mine.full_tensor().shape == other.full_tensor().shape
        torch.testing.assert_close(mine.grad.full_tensor(), other.grad.full_tensor())


results, test_on_all_ranks = checks.suite(globals(), 2)
