"""FSDPModule's methods that do nothing here, or are refused: a table makes them."""

import inspect

import fsdp_models as models


def public(cls):
    return {name for name in dir(cls) if not name.startswith("_")}


def parameters(function):
    return [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]


def test_methods_without_effect_say_so_and_take_what_torchs_take():
    from torch.distributed.fsdp import FSDPModule as Torchs

    ours = models.libddp_fsdp().FSDPModule
    said = {"Without effect: ": [], "Not supported; ": []}
    for name in public(ours):
        for beginning, names in said.items():
            if getattr(ours, name).__doc__.startswith(beginning):
                names.append(name)
    assert len(said["Without effect: "]) == 14
    assert len(said["Not supported; "]) == 2
    for name in (name for names in said.values() for name in names):
        takes = parameters(getattr(ours, name))
        takes_anything = any(kind is inspect.Parameter.VAR_POSITIONAL for _, kind, _ in takes)
        if hasattr(Torchs, name) and not takes_anything:
            assert takes == parameters(getattr(Torchs, name)), name
