"""Optimizers that compute with whole tensors: right on DTensors, a warning on plain rows."""

import warnings

import checks
import ddp_models
import fsdp_models as models
import torch
import torch.distributed as dist


def said(model, make_optimizer):
    optimizer = make_optimizer(model.parameters())
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in range(2):
            models.train(model, 1, lambda _: optimizer)
    found = [w for w in found if "computes with whole tensors" in str(w.message)]
    # By its module, trainers ignore the warnings of a scheduler, say.
    assert all(w.filename.endswith("_whole_tensor_optimizers.py") for w in found)
    return [str(w.message) for w in found]


class Lamb(torch.optim.SGD):
    """Its name is what counts."""


def check_a_warning_names_the_class():
    def lamb(parameters):
        return Lamb(parameters, lr=0.1)

    for make in (models.wrap, models.shard_plain):
        found = said(make(), lamb)
        expected = 1 if dist.get_rank() == 0 and make is models.wrap else 0
        assert len(found) == expected, found  # once in a process
        assert all("Lamb computes" in text and "Hint" in text for text in found)
    assert said(models.shard(), lamb) == []
    assert said(models.wrap(), lambda p: torch.optim.SGD(p, lr=0.1)) == []
    assert said(ddp_models.wrap(models.build()), lamb) == []


def check_muon_on_dtensors_is_that_of_torchs_fsdp2():
    if not hasattr(torch.optim, "Muon"):
        return  # of newer versions

    def losses(model):
        matrices = [p for p in model.parameters() if p.dim() == 2]
        optimizer = torch.optim.Muon(matrices, lr=0.02)
        return models.train(model, 3, lambda _: optimizer)

    assert losses(models.shard()) == losses(models.theirs())


results, test_on_all_ranks = checks.suite(globals(), 2)
