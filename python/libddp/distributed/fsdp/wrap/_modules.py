"""What wrapping does to a module before its parameters are sharded."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch.distributed.fsdp import CPUOffload
from torch.distributed.tensor import DTensor

from libddp._load import load
from libddp.distributed.fsdp.wrap._lookup import (
    by_levels,
    wrapped_module_of,
    wrapped_modules_in,
)
from libddp.distributed.fsdp.wrap._names import canonical
from libddp.errors import ArgumentError

_C = load()


@dataclass
class Ignored:
    """What the caller wants to be left alone."""

    modules: set[torch.nn.Module]
    parameters: set[torch.nn.Parameter]

    @staticmethod
    def of(module: torch.nn.Module, modules, states) -> Ignored:
        """From torch's arguments; `states` holds parameters or modules."""
        if modules is not None and states is not None:
            raise ArgumentError(
                "libddp fsdp: Cannot pass both ignored_modules and ignored_states at the same time,"
                " they exclude each other. Hint: ignored_states takes modules too."
            )
        entries = list(modules if modules is not None else states or ())
        roots = [e for e in entries if isinstance(e, torch.nn.Module)]
        parameters = {e for e in entries if isinstance(e, torch.nn.Parameter)}
        kinds = sorted({type(entry) for entry in entries}, key=repr)
        for kind in kinds:
            if not issubclass(kind, (torch.nn.Module, torch.nn.Parameter)):
                raise ArgumentError(
                    f"libddp fsdp: cannot ignore a {kind.__name__}. "
                    "Hint: pass modules or parameters."
                )
        if modules is not None and len(roots) < len(entries):
            raise ArgumentError(
                "libddp fsdp: ignored_modules expects nn.Module list elements but got types "
                f"{kinds}. Hint: pass parameters as ignored_states."
            )
        if len(entries) not in (len(roots), len(parameters)):
            raise ArgumentError(
                "libddp fsdp: ignored_states expects all nn.Parameter or all nn.Module list "
                f"elements but got types {kinds}. Hint: pass the modules' parameters."
            )
        for root in roots:
            if wrapped_module_of(root) is not None:
                raise ArgumentError(
                    "libddp fsdp: `ignored_modules` should not include FSDP modules, but has a "
                    f"{type(root).__name__} that is wrapped. Hint: ignore it before it is wrapped."
                )
        if module in roots:
            warnings.warn(
                "libddp fsdp: Trying to ignore the top-level module passed into the FSDP "
                "constructor itself will result in all parameters being ignored and is not well-"
                f"supported: {type(module).__name__}. Hint: name modules under it.",
                stacklevel=5,
            )
        all_modules = {m for root in roots for m in root.modules()}
        for root in roots:
            parameters.update(root.parameters())
        return Ignored(all_modules, parameters)


def device_of(device_id) -> torch.device | None:
    """The argument device_id; refuses a device that is not there."""
    if device_id is None:
        return None
    try:
        device = torch.device(device_id)
    except RuntimeError as error:  # an index below zero, a word
        raise _no_device(device_id, f"{error}") from error
    if device.type == "cpu":
        return device
    there = torch.get_device_module(device) if _is_accelerator(device) else None
    if there is None:
        raise _no_device(device_id, "modules are sharded on the CPU only here")
    if (device.index or 0) >= there.device_count():
        raise _no_device(device_id, f"modules are sharded on {there.device_count()} devices here")
    if device.index is None:
        device = torch.device(device.type, there.current_device())
    return device


def _no_device(device_id, why: str) -> ArgumentError:
    return ArgumentError(
        f"libddp fsdp: device_id={device_id!r}: there is no such device: {why}. "
        "Hint: leave device_id out to shard a module where its parameters are."
    )


def home_on(mesh) -> torch.device:
    """Where torch's fully_shard puts a module: on the mesh's kind of device; without a mesh on the
    accelerator, if there is one that libddp moves tensors of."""
    if mesh is not None:
        return device_of(mesh.device_type)
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is None or (found.type == "cuda" and not _C.build_info()["cuda"]):
        return torch.device("cpu")
    return device_of(found.type)


def device_type_of(modules: Iterable[torch.nn.Module], device: torch.device | None = None) -> str:
    """Where these modules will be sharded: the type of `device`, or that of their parameters."""
    if device is not None:
        return device.type
    tensors = (p for module in modules for p in module.parameters())
    return next((p.device.type for p in tensors if not p.is_meta), "cpu")


def _is_accelerator(device: torch.device) -> bool:
    found = torch.accelerator.current_accelerator(check_available=True)
    return found is not None and found.type == device.type


def place(
    module: torch.nn.Module,
    device: torch.device | None,
    init: Callable | None,
    ignored: Ignored,
) -> None:
    """Parameters and buffers have values afterwards, on the device if there is one."""
    materialise(module, init, ignored, device)
    move(module, device, ignored)


def move(module: torch.nn.Module, device: torch.device | None, ignored: Ignored) -> None:
    """Parameters and buffers that have values go to the device, in the same objects.

    Those of sharded modules under it are where they belong: offloaded ones stay on the CPU.
    """
    sharded = {p for wrapped in wrapped_modules_in(module) for _, p in wrapped.parameters}
    for part in module.modules() if device is not None else ():
        if part in ignored.modules:
            continue
        for tensor in (*part.parameters(recurse=False), *part.buffers(recurse=False)):
            if tensor.is_meta or tensor.device == device or tensor in ignored.parameters:
                continue
            if tensor in sharded or isinstance(tensor, DTensor):
                continue
            with torch.no_grad():
                _move_one(tensor, device)


def _move_one(tensor: torch.Tensor, device: torch.device) -> None:
    grad = tensor.grad
    tensor.grad = None
    moved = tensor.detach().to(device)
    if torch._has_compatible_shallow_copy_type(tensor, moved):
        tensor.data = moved
    else:
        if isinstance(tensor, torch.nn.Parameter):
            moved = torch.nn.Parameter(moved, tensor.requires_grad)
        moved.__dict__.update(tensor.__dict__)
        torch.utils.swap_tensors(tensor, moved)
    if grad is not None:
        tensor.grad = grad.to(device)


def offload_of(cpu_offload: CPUOffload | bool | None) -> CPUOffload:
    """torch accepts a plain bool."""
    if isinstance(cpu_offload, CPUOffload):
        return cpu_offload
    return CPUOffload(offload_params=bool(cpu_offload))


def offloaded_from(
    parameters: Iterable[torch.Tensor], device: torch.device | None, mesh=None
) -> torch.device | None:
    """The device that offloaded parameters are computed with on; None = the CPU.

    In this order: the wanted one, that of the parameters, the current one of the mesh's type.
    """
    if device is None:
        there = (p.device for p in parameters if p.device.type not in ("cpu", "meta"))
        device = next(there, None)
    if device is None and mesh is not None and mesh.device_type != "cpu":
        device = device_of(mesh.device_type)
    return None if device is None or device.type == "cpu" else device


def is_container(module: torch.nn.Module) -> bool:
    """Whether it only holds modules, so that no forward of its own makes their parameters whole."""
    is_one = isinstance(module, (torch.nn.ModuleList, torch.nn.ModuleDict))
    return is_one and type(module).forward is torch.nn.Module.forward


def warn_of_container(module: torch.nn.Module) -> None:
    """As torch does it, which goes on as well: its elements may be wrapped themselves."""
    if is_container(module):
        warnings.warn(
            "libddp fsdp: FSDP will not all-gather parameters for containers that do not implement "
            f"forward: {type(module).__name__}. Hint: wrap each of its elements.",
            stacklevel=3,
        )


def materialise(
    module: torch.nn.Module,
    init: Callable | None,
    ignored: Ignored,
    device: torch.device | None = None,
) -> None:
    """Gives parameters on the meta device memory and values; on the device, None = the CPU."""
    if init is not None and not callable(init) and any(p.is_meta for p in module.parameters()):
        raise ArgumentError(
            f"libddp fsdp: param_init_fn: expected {init!r} to be callable, but got a "
            f"{type(init).__name__}. Hint: pass a function of a module that gives its own "
            "parameters memory and values."
        )
    parts = by_levels(module, ignored.modules)
    has_meta = any(_has_meta(part) for _, part in parts)
    for name, part in parts:
        if init is not None and has_meta:
            init(part)
        elif not _has_meta(part):
            continue
        elif hasattr(part, "reset_parameters"):
            part.to_empty(device=device or "cpu", recurse=False)
            with torch.no_grad():
                part.reset_parameters()
        else:
            raise ArgumentError(
                f"libddp fsdp: module {name!r} ({type(part).__name__}) has parameters on the meta "
                "device and no reset_parameters(). Hint: pass param_init_fn."
            )


def _has_meta(module: torch.nn.Module) -> bool:
    own = (*module.parameters(recurse=False), *module.buffers(recurse=False))
    return any(tensor.is_meta for tensor in own)


def take_from_first(parameters, module: torch.nn.Module, shard, replicate) -> None:
    """Every rank gets rank 0's values of these (name, parameter) pairs and of all buffers."""
    tensors = [parameter.detach() for _, parameter in parameters] + list(module.buffers())
    for group in (replicate, shard):
        if group is not None:
            _C.broadcast_tensors(group, tensors, root=0)


def buffers_to_cast(
    module: torch.nn.Module, dtype: torch.dtype | None, ignored: Ignored
) -> dict[str, torch.dtype]:
    """Canonical names -> dtypes of floating-point buffers that no wrapped module in `module` has.

    Empty without a dtype to cast them to.
    """
    found: dict[str, torch.dtype] = {}
    if dtype is None:
        return found
    done = {
        child for s in wrapped_modules_in(module) for child in s.module.modules()
    } | ignored.modules
    for prefix, part in module.named_modules():
        for name, buffer in part.named_buffers(recurse=False) if part not in done else ():
            if buffer.is_floating_point():
                found[canonical(name, prefix)] = buffer.dtype
    return found


def cast_buffers(
    module: torch.nn.Module, dtypes: dict[str, torch.dtype], dtype: torch.dtype | None
) -> None:
    """What buffers_to_cast has named is in another dtype from now on, None = its own; the objects
    stay.
    """
    for name, buffer in torch.nn.Module.named_buffers(module, remove_duplicate=False):
        known = dtypes.get(canonical(name))
        if known is not None and buffer.is_floating_point():
            buffer.data = buffer.to(dtype or known)
