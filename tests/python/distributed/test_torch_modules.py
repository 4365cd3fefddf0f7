"""Every public module under torch.distributed is there by libddp's path."""

import pkgutil
import sys
from importlib import import_module

import pytest
import ranks
import torch.distributed
import torch.nn.parallel

#: Work on import: they need something that is not there, or start it.
_OTHERS = ("rpc", "autograd", "nn", "elastic.rendezvous.etcd", "benchmarks", "_", "flight_recorder")


def public_modules():
    found = pkgutil.walk_packages(torch.distributed.__path__, "torch.distributed.", lambda _: None)
    names = [module.name.removeprefix("torch.distributed.") for module in found]
    public = [n for n in names if not any(part.startswith("_") for part in n.split("."))]
    return sorted(name for name in public if not name.startswith(_OTHERS))


@pytest.mark.parametrize("name", public_modules())
def test_a_module_is_torchs_or_has_its_names(name):
    try:
        theirs = import_module(f"torch.distributed.{name}")
    except ImportError as error:
        pytest.skip(f"torch's own does not import: {error}")
    spec = getattr(theirs, "__spec__", None)
    ours = import_module(f"libddp.distributed.{name}")
    assert getattr(theirs, "__spec__", None) is spec
    assert theirs.__name__ == f"torch.distributed.{name}"
    if ours is theirs:
        assert sys.modules[f"libddp.distributed.{name}"] is theirs
        return
    assert ours.__name__.startswith("libddp.")
    missing = [n for n in getattr(theirs, "__all__", ()) if not hasattr(ours, n)]
    assert missing == []


def test_a_list_that_is_long_enough():
    assert {"checkpoint.state_dict", "fsdp.api", "tensor.parallel", "device_mesh"} <= {
        *public_modules()
    }


def test_a_name_that_nobody_has():
    with pytest.raises(ModuleNotFoundError, match=r"libddp\.distributed\.nothing"):
        import_module("libddp.distributed.nothing")
    with pytest.raises(ModuleNotFoundError, match=r"libddp\.distributed\.checkpoint\.nothing"):
        import_module("libddp.distributed.checkpoint.nothing")


def mesh_by_swapped_import():
    from libddp.distributed import destroy_process_group, init_device_mesh, native

    mesh = init_device_mesh("cpu", (2,))
    found = native(mesh.get_group()).size(), torch.distributed.get_backend()
    destroy_process_group()
    return found


def mesh_under_the_drop_in():
    import libddp

    libddp.install()
    from libddp.distributed import destroy_process_group, native

    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2,))
    found = native(mesh.get_group()).size(), torch.distributed.distributed_c10d.get_backend()
    destroy_process_group()
    return found


def fully_shard_makes_a_group():
    from libddp.distributed import destroy_process_group, native
    from libddp.distributed.fsdp import fully_shard

    model = fully_shard(torch.nn.Linear(2, 2))
    found = native(model.weight.device_mesh.get_group()).size(), torch.distributed.get_backend()
    destroy_process_group()
    return found


@pytest.mark.parametrize(
    "how", [mesh_by_swapped_import, mesh_under_the_drop_in, fully_shard_makes_a_group]
)
def test_who_needs_a_group_makes_libddps(how):
    assert ranks.run(how, 2) == [(2, "libddp")] * 2
