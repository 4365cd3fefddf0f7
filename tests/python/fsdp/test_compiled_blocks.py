"""Blocks that torch.compile has compiled, in a sharded model whose gradients are there already."""

import checks
import fsdp_models as models
import torch


def compiled_in_place(model):
    for block in model.blocks:
        block.compile(backend="aot_eager")
    return model


def losses(prepare, wrap) -> list[float]:
    """Of steps with two passes each, and of evaluations while gradients are there."""
    torch._dynamo.reset()
    model = wrap(prepare(models.build()))
    optimizer = models.adamw(model.parameters())
    found = []

    def evaluate():
        with torch.no_grad():
            found.append(model(models.tokens(100))[1].item())

    for step in range(3):
        for micro in range(2):
            loss = model(models.tokens(2 * step + micro))[1]
            loss.backward()
            found.append(loss.item())
            evaluate()
        for parameter in model.parameters():
            assert parameter.grad.shape == parameter.shape
        optimizer.step()
        evaluate()
        optimizer.zero_grad()
    return found


def same_losses(prepare, wrap):
    found, wanted = losses(prepare, wrap), losses(lambda model: model, wrap)
    torch.testing.assert_close(torch.tensor(found), torch.tensor(wanted), rtol=1e-5, atol=1e-6)


def check_class_over_blocks_compiled_in_place():
    same_losses(compiled_in_place, models.wrap)


def check_fully_shard_over_blocks_compiled_in_place():
    same_losses(compiled_in_place, models.shard)


results, test_on_all_ranks = checks.suite(globals(), 2)
