"""A parameter that scripts see as torch's DTensor, as FSDP2 has them.

Between steps a module has, for each of its parameters, a DTensor (`sharded`) whose local tensor is
what this rank owns, in the unit's memory; while its forward or backward runs, the plain parameter
(`unsharded`) that the C++ unit knows, which shows the whole tensor. What scripts do to the DTensor
counts: `.grad` and `requires_grad` are taken over when a step or a pass begins, and averages are
shown in its `.grad`, as DTensors, when the pass ends. The unit works on plain tensors throughout.

A parameter that is cut on another dimension than the first has its rows, and those of its gradient,
in memory of their own, contiguous as torch's are: in the unit's they are columns. They are copied
there when a step or a pass begins, and gradients from there when one ends.
"""

from __future__ import annotations

from sys import getrefcount

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from libddp._load import load
from libddp.distributed.fsdp.wrap import _local_steps, _placement
from libddp.distributed.fsdp.wrap._annotated import AnnotatedTensor
from libddp.distributed.fsdp.wrap._extensions import Extension, has_extension
from libddp.distributed.fsdp.wrap._mesh_info import placed_of
from libddp.distributed.fsdp.wrap._sharding import Sharding
from libddp.distributed.fsdp.wrap._unchecked import unchecked
from libddp.errors import ArgumentError, StateError

_C = load()
#: References to an object of a local variable, as getrefcount sees them.
_NO_OTHERS = 2
#: What a DTensor without memory has for its local tensor.
NOTHING = torch.empty(0, device="cpu")


class ShardedParam:
    """One parameter of a unit, in its two forms."""

    __slots__ = (
        "__weakref__",
        "dim",
        "extension",
        "gradient_dtype",
        "inner",
        "local",
        "name",
        "places",
        "sharded",
        "shown",
        "spare",
        "spec",
        "unit_shape",
        "unsharded",
    )

    def __init__(
        self,
        name: str,
        parameter: torch.nn.Parameter,
        sharding: Sharding,
        dim: int = 0,
        module: torch.nn.Module | None = None,
    ) -> None:
        #: In the unit.
        self.name = name
        #: That is cut. The unit cuts dim 0, so its parameter has this one there.
        self.dim = dim
        #: See Sharding.
        self.gradient_dtype = sharding.gradient_dtype(name, parameter.dtype)
        #: `inner`: of a parameter that is placed by itself (tensor parallelism), what it is whole.
        self.spec, self.inner, own = placed_of(name, parameter, sharding, dim)
        #: What the unit has.
        self.unsharded: torch.nn.Parameter | None = parameter
        if dim or self.inner is not None:
            own = self.to_unit(own.detach()).contiguous()
            self.unsharded = torch.nn.Parameter(own, parameter.requires_grad)
        #: Of a class that says itself what is gathered.
        self.extension: Extension | None = None
        if has_extension(parameter) and dim == 0:
            self.extension = Extension(parameter, sharding, module)
            self._stand_in(parameter)
        #: Of that, whole.
        self.unit_shape = self.unsharded.shape
        #: None until there is a unit, or it is known that there is none yet.
        self.sharded: torch.nn.Parameter | None = None
        #: The local tensor of `sharded`; None on the meta device.
        self.local: torch.Tensor | None = None
        #: The gradient that `sharded` was given by the last pass.
        self.shown: DTensor | None = None
        #: One that nobody has any more, without memory: making DTensors is slow.
        self.spare: DTensor | None = None
        #: (registry of a module, name in it) wherever it is registered.
        self.places: list[tuple[dict, str]] = []

    def is_at_a_place(self, parameter: torch.Tensor) -> bool:
        """Whether a module has `parameter` where it had this one."""
        return any(registry.get(key) is parameter for registry, key in self.places)

    def at_its_place(self) -> torch.nn.Parameter:
        """What the module has there now."""
        registry, key = self.places[0]
        return registry[key]

    def to_unit(self, tensor: torch.Tensor) -> torch.Tensor:
        """As the unit has it."""
        return tensor.movedim(self.dim, 0) if self.dim else tensor

    def from_unit(self, tensor: torch.Tensor) -> torch.Tensor:
        """The other way round."""
        return tensor.movedim(0, self.dim) if self.dim else tensor

    def _to_show(self, tensor: torch.Tensor) -> torch.Tensor:
        """What scripts see of this rank's part; a copy where it would not be contiguous."""
        return self.from_unit(tensor).contiguous() if self.dim else tensor

    def inner_shape(self) -> torch.Size:
        """Of the whole tensor that the unit cuts; of a DTensor, its local part's."""
        shape = list(self.unit_shape)
        shape.insert(self.dim, shape.pop(0))
        return torch.Size(shape)

    def whole(self) -> torch.Tensor:
        """What the module has while it computes; where it is no parameter, with a graph."""
        if not self.is_special():
            return self.unsharded
        with torch.enable_grad(), unchecked():  # a recomputation is announced without gradients
            if self.extension is not None:
                return self.extension.whole(self.unsharded, self.sharded._local_tensor)
            whole = self.from_unit(self.unsharded)
            if self.inner is not None:
                whole = self.inner.whole(whole, self.gradient_dtype)
        if self.gradient_dtype is not None and whole is not self.unsharded:
            _C.keep_gradient_dtype(whole)
        return whole

    def annotate(self) -> None:
        """What the module has now says what it is to spmd_types, where a forward is checked."""
        if isinstance(self.inner, AnnotatedTensor):
            self.inner.annotate(self.at_its_place())

    def is_special(self) -> bool:
        """Whether the two forms differ in more than who owns what."""
        return bool(self.dim) or self.inner is not None or self.extension is not None

    def extend(self, sharding: Sharding, module: torch.nn.Module | None) -> bool:
        """Whether a script has given its rows what a class with an all-gather of its own has; then
        they are the same object with memory of their own, and the unit is to be made anew.
        """
        local = self.local
        if self.extension is not None or local is None or not has_extension(local):
            return False
        if self.dim or self.inner is not None:
            raise ArgumentError(
                f"libddp fsdp: parameter {self.name!r} has fsdp_pre_all_gather, and is cut on "
                f"dim {self.dim}{' of a DTensor' * (self.inner is not None)}: an all-gather of its "
                "own is of rows. Hint: leave out shard_placement_fn or tensor parallelism for it."
            )
        local.data = local.detach().clone()
        self.extension = Extension(self.sharded, sharding, module, local)
        return True

    def _stand_in(self, parameter: torch.Tensor) -> None:
        """Of an extension's parameter the unit has the gradient alone."""
        plain = torch.zeros(parameter.shape, dtype=parameter.dtype, device=parameter.device)
        self.unsharded = torch.nn.Parameter(plain, parameter.requires_grad)

    def show_on_meta(self, sharding: Sharding) -> None:
        """There is no memory yet."""
        local = self._to_show(sharding.own_rows(self.unsharded.detach()))
        self._wrap(local if self.extension is None else self.extension.local)

    def _wrap(self, local: torch.Tensor) -> None:
        dtensor = DTensor(local, self.spec, requires_grad=False)
        self.sharded = torch.nn.Parameter(dtensor, requires_grad=self.unsharded.requires_grad)
        vars(self.sharded).update(vars(self.unsharded))
        _local_steps.compute_locally(self)

    def make_unsharded(self, sharding: Sharding) -> None:
        """The plain parameter, with the rows that `sharded` has; the others are undefined."""
        if self.sharded is None or self.sharded.is_meta:
            return
        self.spec = self.sharded._spec
        self.shown = self.spare = None
        if self.extension is not None:
            self.extension.local = self.sharded._local_tensor
            self._stand_in(self.sharded)
            return
        local = self.to_unit(self.sharded._local_tensor)
        whole = torch.empty(self.unit_shape, dtype=local.dtype, device=local.device)
        sharding.own_rows(whole).copy_(local)
        self.unsharded = torch.nn.Parameter(whole, self.sharded.requires_grad)

    def leave(self, sharding: Sharding) -> None:
        """The rows of `sharding`, which has other groups now, and undefined values."""
        _placement.check_dim(self.name, self.spec.shape, self.dim, sharding.num_shards)
        before, meta = self.sharded._local_tensor, self.spec.tensor_meta
        own = sharding.own_rows(torch.empty(self.unit_shape, device="meta"))
        value = float("nan") if before.dtype.is_floating_point else 0
        local = torch.full(own.shape, value, dtype=before.dtype, device=before.device)
        placements = _placement.placements_of(sharding, self.dim)
        self.sharded.grad = self.unsharded.grad = None
        self.sharded._spec = DTensorSpec(sharding.mesh, placements, tensor_meta=meta)
        self.sharded._local_tensor = self._to_show(local)
        self.spec, self.local = self.sharded._spec, None

    def settle(self) -> None:
        """The unit has made its memory: `sharded` has what `unsharded` shows of it now."""
        if self.extension is not None:
            local = self.extension.local
        else:
            local = self._to_show(_C.alias_of(self.unsharded))
        if self.sharded is None:
            self._wrap(local)
        else:
            self.sharded._local_tensor = local
        self.local = self.sharded._local_tensor

    def is_settled(self) -> bool:
        """Whether nobody has given it other memory or put another object in its place."""
        sharded = self.sharded
        if sharded._local_tensor is not self.local:
            return False
        return all(registry.get(key) is sharded for registry, key in self.places)

    def adopt(self, unit: str) -> bool:
        """Takes over what a script has put there; False where it is of another dtype."""
        found = {id(p): p for p in (registry.get(key) for registry, key in self.places)}
        found.pop(id(self.sharded), None)
        new = next(iter(found.values()), self.sharded)
        if len(found) > 1 or not isinstance(new, DTensor) or not self._is_alike(new._spec):
            raise StateError(
                f"libddp fsdp: unit {unit!r}: parameter {self.name!r} was replaced by another "
                "object after wrapping. Hint: write values in place (copy_), or put a DTensor of "
                "the same shape and placements there."
            )
        self.sharded = new
        _local_steps.compute_locally(self)
        self.register(new)
        local = new._local_tensor
        if local.dtype != self.local.dtype:
            return False
        if local is not self.local:
            self.local.copy_(local.detach())
            new._local_tensor = self.local
        return True

    def _is_alike(self, spec: DTensorSpec) -> bool:
        return spec.shape == self.spec.shape and spec.placements == self.spec.placements

    def register(self, parameter: torch.nn.Parameter) -> None:
        for registry, key in self.places:
            registry[key] = parameter

    def take_over(self) -> None:
        """What scripts have done to `sharded` counts for `unsharded`."""
        sharded, unsharded = self.sharded, self.unsharded
        if sharded.requires_grad != unsharded.requires_grad:
            unsharded.requires_grad_(sharded.requires_grad)
        grad, own = sharded.grad, unsharded.grad
        if self.dim:
            self._copy_to_unit()
        if grad is None:
            if self.shown is not None:
                self._let_go()
            if own is not None:
                unsharded.grad = None
        elif grad is not self.shown:  # a script's own
            self.shown = grad
            unsharded.grad = self.local_gradient(grad)
        elif own is None:  # cleared by an optimizer that was built before the wrapping
            sharded.grad = None
            self._let_go()
        elif self.dim:
            _copy(self.to_unit(grad._local_tensor), own)
        elif grad._local_tensor.data_ptr() != own.data_ptr():  # another one, as after model.half()
            unsharded.grad = self.local_gradient(grad)

    def _copy_to_unit(self) -> None:
        """The rows that scripts have written, unless the unit is whole: then it has them."""
        rows = _C.alias_of(self.unsharded)
        if self.local is not None and rows.numel() == self.local.numel():
            _copy(self.to_unit(self.local), rows)

    def _let_go(self) -> None:
        """Of the last pass's gradient; what nobody has kept serves the next pass."""
        shown, self.shown = self.shown, None
        if getrefcount(shown) == _NO_OTHERS and shown._use_count() == 1:
            shown._local_tensor = NOTHING
            self.spare = shown

    def show_gradient(self) -> None:
        sharded, own = self.sharded, self.unsharded.grad
        if own is None:
            return
        grad = sharded.grad
        if grad is not None:
            if grad is self.shown:
                if self.dim:
                    _copy(self.from_unit(own), grad._local_tensor)
                if self.dim or own.data_ptr() == grad._local_tensor.data_ptr():
                    return
            else:  # autograd has written it in this pass: a use outside of the module's forward
                with torch.no_grad():
                    own.add_(self.local_gradient(grad))
        local = self._to_show(_C.alias_of(own))
        shown, self.spare = self.spare, None
        if shown is None:
            shown = DTensor(local, self.spec, requires_grad=False)
        else:
            shown._local_tensor = local
        self.shown = sharded.grad = shown

    def local_gradient(self, grad: torch.Tensor) -> torch.Tensor:
        """What this rank has of a gradient that is a DTensor."""
        if not isinstance(grad, DTensor):
            raise ArgumentError(
                f"libddp fsdp: the gradient of parameter {self.name!r} is a plain tensor of shape "
                f"{list(grad.shape)}, the parameter a DTensor. Hint: assign a DTensor, as "
                "p.grad * 2 is one, or change the gradient in place."
            )
        if grad.placements != self.spec.placements:
            grad = grad.redistribute(self.spec.mesh, self.spec.placements)
        return self.to_unit(grad._local_tensor)

    def has_hooks(self) -> bool:
        sharded = self.sharded
        return bool(sharded._post_accumulate_grad_hooks) or (
            "_in_backward_optimizers" in sharded.__dict__
        )

    def run_hooks(self) -> None:
        """What users want to be done with the averaged gradient."""
        sharded = self.sharded
        for hook in list((sharded._post_accumulate_grad_hooks or {}).values()):
            hook(sharded)
        # torch's _apply_optimizer_in_backward hangs them on the node that accumulates.
        for optimizer in getattr(sharded, "_in_backward_optimizers", ()):
            optimizer.step()
            sharded.grad = None
        self.take_over()


@torch.no_grad()
def _copy(source: torch.Tensor, to: torch.Tensor) -> None:
    if source.data_ptr() != to.data_ptr():
        to.copy_(source)


def rows_of(params: list[ShardedParam]) -> list[tuple]:
    """What the bindings need of each, to do in every step what its methods do; empty where some of
    the two forms differ in more than who owns what.
    """
    if any(param.is_special() or param.local is None for param in params):
        return []
    return [(p, p.sharded, p.unsharded, p.local, tuple(p.places)) for p in params]
