"""set_requires_gradient_sync of single units, beside torch's FSDP2 on Gloo."""

import copy

import checks
import fsdp_models as models
import pytest
import torch
import torch.distributed as dist
from torch import nn


def layers(has_own=True):
    """A unit in a model that has, or has not, parameters of its own."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4) if has_own else nn.Tanh())


def ours(**arguments):
    model = layers(**arguments)
    models.libddp_fsdp().fully_shard(model[0])
    return models.libddp_fsdp().fully_shard(model)


def theirs_in_two_units():
    model = layers()
    return models.theirs(model, parts=[model[0]])


def one_pass(model):
    loss_of(model).backward()


def loss_of(model):
    return model(torch.arange(8.0).view(2, 4) / 7 + dist.get_rank()).sum()


def assert_trains_as_torch(model, theirs):
    """After another pass through both, all of whose units average."""
    for each in (model, theirs):
        each.set_requires_gradient_sync(True)
        one_pass(each)
    wanted = models.whole_gradients(theirs)
    found = models.whole_gradients(model)
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        torch.testing.assert_close(found[name], gradient)


def differing():
    """What makes flags of one model differ."""
    return (
        lambda model: model[0].set_requires_gradient_sync(False),
        lambda model: model.set_requires_gradient_sync(False, recurse=False),
    )


def assert_shows_as_torch(model, theirs):
    for mine, other in zip(model.parameters(), theirs.parameters(), strict=True):
        assert (mine.grad is None) == (other.grad is None)
        if mine.grad is not None:
            torch.testing.assert_close(mine.grad.full_tensor(), other.grad.full_tensor())


def check_units_that_differ():
    """Some average in a pass in which others add up."""
    for differ in differing():
        for has_run in (False, True):
            for passes in (1, 2):
                for is_late in (False, True):
                    found = ours(), theirs_in_two_units()
                    for each in found:
                        if has_run:
                            one_pass(each)
                        loss = loss_of(each)
                        differ(each)
                        if is_late:
                            loss.backward()
                        for _ in range(passes):
                            one_pass(each)
                    assert_shows_as_torch(*found)
                    assert_trains_as_torch(*found)


class Chunked(nn.Module):
    """The last unit is a list of modules, one of which is called in chunks behind the forward."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 3, bias=False)

    def forward(self, x):
        return self.norm(self.body(x))


def batch(step):
    torch.manual_seed(10 * step + dist.get_rank())
    return torch.randn(6, 4)


def chunked_pass(model, step):
    """As trainers do that never have the logits of a whole batch in memory."""
    hidden = model(batch(step))
    head, gradients = model.head, []
    head.set_reshard_after_forward(False)
    head.set_reshard_after_backward(False)
    head.set_requires_gradient_sync(False, recurse=False)
    head.unshard()
    chunks = hidden.detach().split(2)
    for number, chunk in enumerate(chunks):
        if number == len(chunks) - 1:
            head.set_requires_gradient_sync(True, recurse=False)
        chunk = chunk.clone().requires_grad_()
        head(chunk).pow(2).sum().backward()
        gradients.append(chunk.grad)
    head.set_reshard_after_forward(True)
    head.set_reshard_after_backward(True)
    head.set_requires_gradient_sync(True, recurse=False)
    head.reshard()
    hidden.backward(torch.cat(gradients))


def check_chunks_of_the_last_unit():
    """The gradients are those of the whole batch; torch 2.11 itself fails here."""
    torch.manual_seed(1)
    plain = Chunked()
    model = copy.deepcopy(plain)
    models.libddp_fsdp().fully_shard(model.body)
    models.libddp_fsdp().fully_shard([model.norm, model.head])
    models.libddp_fsdp().fully_shard(model)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.01) for each in (model, plain)]
    for step in range(3):
        chunked_pass(model, step)
        plain.head(plain(batch(step))).pow(2).sum().backward()
        for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
            dist.all_reduce(other.grad)
            other.grad /= dist.get_world_size()
            torch.testing.assert_close(mine.grad.full_tensor(), other.grad)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def check_all_units_alike_however_they_were_set():
    def of_each(model):
        for module in (model, model[0]):
            module.set_requires_gradient_sync(False, recurse=False)

    def of_the_model(model):
        model.set_requires_gradient_sync(False)

    def between_forward_and_backward(model):
        loss = loss_of(model)
        of_each(model)
        loss.backward()

    for set_flags in (of_each, of_the_model, between_forward_and_backward):
        for has_run in (False, True):
            model, theirs = ours(), models.theirs(layers(), parts=[])
            for each in (model, theirs):
                if has_run:
                    one_pass(each)
                    each.zero_grad()
                each.set_requires_gradient_sync(False)
            set_flags(model)
            for each in (model, theirs):
                one_pass(each)
            if set_flags is between_forward_and_backward:
                one_pass(theirs)
            assert all(p.grad is None for p in model.parameters())
            assert_trains_as_torch(model, theirs)


def check_a_unit_without_parameters_says_nothing():
    model = ours(has_own=False)
    model.set_requires_gradient_sync(False, recurse=False)
    one_pass(model)
    assert all(p.grad is not None for p in model.parameters())
    model[0].set_requires_gradient_sync(False)
    model.zero_grad()
    one_pass(model)
    assert all(p.grad is None for p in model.parameters())


def plain(**arguments):
    return models.libddp_fsdp().fully_shard(layers(**arguments), use_dtensor=False)


def check_reset_iter_state_lets_go_of_sums_and_gradients():
    for make in (ours, plain):
        for between in (lambda model: None, lambda model: torch.no_grad()(loss_of)(model)):
            model = make()
            one_pass(model)
            model.set_requires_gradient_sync(False)
            for _ in range(2):
                one_pass(model)
            model.reset_iter_state()
            assert all(p.grad is None for p in model.parameters())
            between(model)
            one_pass(model)  # what came after it counts
            theirs = models.theirs(layers(), parts=[])
            theirs.set_requires_gradient_sync(False)
            one_pass(theirs)
            assert_trains_as_torch(model, theirs)
            model.reset_iter_state()
            model.zero_grad()
            fresh = models.theirs(layers(), parts=[])
            assert_trains_as_torch(model, fresh)


def check_reset_iter_state_after_an_exception():
    model = ours()
    model.set_requires_gradient_sync(False)
    one_pass(model)
    loss = loss_of(model)
    loss.register_hook(lambda grad: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loss.backward()
    model.reset_iter_state()
    assert_trains_as_torch(model, models.theirs(layers(), parts=[]))


def check_mistakes_with_reset_iter_state():
    model = ours()
    model[0].reset_iter_state()  # nothing has run
    one_pass(model)
    with pytest.raises(RuntimeError, match="must be called on the root"):
        model[0].reset_iter_state()
    model.set_requires_gradient_sync(False)
    one_pass(model)
    loss = loss_of(model)
    model.reset_iter_state()
    model.set_requires_gradient_sync(True)
    if dist.get_world_size() > 1:
        with pytest.raises(RuntimeError, match="through a forward from before"):
            loss.backward()
    assert_trains_as_torch(model, models.theirs(layers(), parts=[]))


class Skipping(nn.Sequential):
    def forward(self, x, whole=True):
        return super().forward(x) if whole else self[1](x)


def check_a_forward_that_leaves_out_what_is_to_go():
    if dist.get_world_size() == 1:  # nothing waits there
        return
    torch.manual_seed(3)
    model = Skipping(nn.Linear(4, 4), nn.Linear(4, 4))
    models.libddp_fsdp().fully_shard(model[0])
    models.libddp_fsdp().fully_shard(model)
    model.set_requires_gradient_sync(False)
    one_pass(model)
    model.reset_iter_state()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="the forward after the call has not used it"):
            model(torch.ones(2, 4), whole=False)
    assert_trains_as_torch(model, models.theirs(layers(), parts=[]))


results, test_on_all_ranks = checks.suite(globals(), 1, 2, apart=True)
