"""What both faces of sharding share: the state of a wrapped module, and its forward.

A module that is wrapped has a `WrappedModule`: the C++ unit of its parameters. The outermost one
whose forward runs first becomes the root; it joins the units under it to one C++ model, which knows
the order of all hooks.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field
from functools import wraps
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.utils import _apply_to_tensors

from libddp._load import load
from libddp._torch_patches import dynamo, split_backward
from libddp.distributed._exit import describe, live_groups
from libddp.distributed.fsdp.wrap import (
    _discarding,
    _gradient_sync,
    _hidden_shards,
    _offload,
    _one_unit_warning,
    _optimizers,
    _pending_inputs,
    _refusals,
    _sharded_class,
    _sharded_place,
)
from libddp.distributed.fsdp.wrap._dtensors import is_dtensor
from libddp.distributed.fsdp.wrap._faces import Faces
from libddp.distributed.fsdp.wrap._handed_out import handed_out
from libddp.distributed.fsdp.wrap._lookup import (
    WRAPPED,
    own_parameters_of,
    wrapped_module_of,
    wrapped_modules_in,
)
from libddp.distributed.fsdp.wrap._open_units import OpenUnits
from libddp.distributed.fsdp.wrap._placement import dim_of
from libddp.distributed.fsdp.wrap._root_parts import RootParts
from libddp.distributed.fsdp.wrap._sharded_param import ShardedParam, rows_of
from libddp.distributed.fsdp.wrap._sharding import Sharding
from libddp.distributed.fsdp.wrap._summoned_forward import SummonedForward
from libddp.distributed.fsdp.wrap._unchecked import unchecked
from libddp.errors import ArgumentError, StateError
from libddp.nn.parallel import _backward_errors

_C = load()
dynamo.keep_out("libddp.distributed.fsdp")
_numbers = count()


@dataclass(eq=False)
class WrappedModule:
    """One wrapped module, or several that are one unit."""

    modules: list[torch.nn.Module]
    #: Of the unit.
    name: str
    sharding: Sharding
    #: (name in the module, parameter that scripts see) of the unit.
    parameters: list[tuple[str, torch.nn.Parameter]]
    #: Parameters of the module that are left alone.
    ignored: list[torch.nn.Parameter] = field(default_factory=list)
    #: Units of other parameters of the module, over other groups; they run inside of this one.
    beside: list[WrappedModule] = field(default_factory=list)
    #: The unit that has this one beside it.
    main: WrappedModule | None = None
    #: The C++ unit; None while the parameters have no values yet, see _deferred.py.
    made: Any = None
    #: Where scripts see DTensors: both forms of each parameter, in the same order.
    params: list[ShardedParam] = field(default_factory=list)
    #: The same for the bindings, see rows_of.
    rows: list[tuple] = field(default_factory=list)
    #: Parameters show copies of whole tensors.
    summoned: SummonedForward | None = None
    #: The unit was made anew: the model that has the old one must be made anew too.
    is_stale: bool = False
    #: What gradients are divided by, if not by the number of ranks.
    divisor: float | None = None
    #: In place of libddp's collectives: `hook(gradients, average)`.
    hook: Callable | None = None
    #: Called when the module becomes part of a model that is used.
    on_join: Callable[[], None] | None = None
    #: Of the whole model; None before the first forward.
    model: Any = None
    is_root: bool = False
    root: WrappedModule | None = None
    #: What set_requires_gradient_sync has said.
    syncs: bool = True
    #: What waits in the unit, or of the root in any, is to go with the next forward.
    discards: bool = False
    #: (registry of a module, name in it, name in the unit, parameter) wherever one is registered.
    places: list[tuple] = field(default_factory=list)
    #: When it was wrapped: all ranks wrap in one order.
    number: int = 0
    #: Its parameters had no values then; None = nobody asked.
    was_deferred: bool | None = None
    #: It has left its group, and no other one yet.
    has_left: bool = False
    #: Of the root: those of the whole model, and what the C++ model calls.
    all_wrapped: list[WrappedModule] = field(default_factory=list)
    faces: Faces | None = None
    parts: RootParts | None = None
    #: Of the root, and of units of several modules: which of these are open. None = there are none.
    open_units: OpenUnits | None = None

    @property
    def together(self) -> list[WrappedModule]:
        """The unit and those beside it."""
        return [self, *self.beside]

    @property
    def unit(self):
        """The C++ unit; making it, where that was deferred, is a collective."""
        if self.has_left:
            self._refuse_without_group()
        if self.made is None:
            self._make_deferred()
        return self.made

    def make(self) -> None:
        """Shards the parameters; a collective."""
        _refusals.check_writes(self.modules, self.parameters, self.sharding)
        _optimizers.watch()
        self._find_params()
        self.made = _make_unit(
            name=self.name,
            parameters=self._parameters_of_unit(),
            shard=self.sharding.shard,
            replicate=self.sharding.replicate,
            keep_unsharded=self.sharding.keep_unsharded,
            param_dtype=self.sharding.param_dtype,
            keep_dtype=self.sharding.keep_dtype,
            reduce_dtype=self.sharding.reduce_dtype,
            wide_gradients=self.sharding.wide_gradients,
            keep_low_gradients=self.sharding.keep_low_gradients,
            compute_device=self.sharding.compute_device,
            pin_memory=self.sharding.pin_memory,
        )
        self.made.divide_gradients_by(self.divisor)
        self.made.zero_unused(self.sharding.zeroes_unused)
        self.made.show_waiting(self.sharding.shows_waiting)
        self.made.reduce_by(self.hook)
        if self.sharding.use_dtensor:
            for param in self.params:
                param.settle()
            self._show_sharded()
        else:
            self.places = _places(self.modules, self.parameters)
            _sharded_place.register(self)

    def leave_model(self) -> None:
        """The model is over; what a pass or a forward that broke off has left goes with it."""
        self.forget_model()
        self.summoned, self.has_left = None, True

    def forget_model(self) -> None:
        """Another one may follow."""
        if self.parts is not None:
            self.parts.withdraw()
        self.model, self.root, self.is_root, self.all_wrapped = None, None, False, []
        self.faces, self.open_units, self.parts = None, None, None
        self.is_stale = False

    def leave_group(self) -> None:
        """Parameters show undefined values: whole ones, or the rows of the groups that `sharding`
        has now.
        """
        if self.params:
            self.show(sharded=True)
            for param in self.params:
                param.leave(self.sharding)
            self.rows = []
        elif self.made is not None:
            self.made.leave()
        self.made = None

    def join_group(self) -> None:
        """Shards them; a collective, the one of `attach`."""
        is_deferred = self.was_deferred is not None and is_deferred_everywhere(self)
        self.has_left = False
        if not is_deferred:
            self.make()
        elif self.params:
            self._take_rows()
            self.show(sharded=True)

    def _refuse_without_group(self) -> None:
        raise StateError(
            f"libddp fsdp: unit {self.name!r} has left its process group and could not join "
            "another one: its last rejoin() failed. Hint: call it again, on all ranks."
        )

    def show_on_meta(self) -> None:
        """Where scripts see DTensors, these have no memory yet."""
        if not self.sharding.use_dtensor:
            return
        self._find_params()
        for param in self.params:
            param.show_on_meta(self.sharding)
        self._show_sharded()

    def _show_sharded(self) -> None:
        self._take_rows()
        self.show(sharded=True)

    def show(self, sharded: bool) -> None:
        """What the module has for parameters: DTensors, or whole plain tensors."""
        if self.rows:
            _C.show_faces(self.rows, sharded)
            return
        for param in self.params:
            param.register(param.sharded if sharded else param.whole())

    def _take_rows(self) -> None:
        self.parameters = [(param.name, param.sharded) for param in self.params]
        self.rows = rows_of(self.params)

    def _find_params(self) -> None:
        """Both forms of the parameters, which may be DTensors of this unit already."""
        if not self.sharding.use_dtensor:
            return
        known = {(id(r), key): param for param in self.params for r, key in param.places}
        places = _places(self.modules, self.parameters)
        params = []
        for name, parameter in self.parameters:
            own = [(r, key) for r, key, _, p in places if p is parameter]
            param = known.get((id(own[0][0]), own[0][1])) if is_dtensor(parameter) else None
            if param is None:
                dim, owner = self._dim_of(name, parameter), self._owner_of(parameter)
                param = ShardedParam(name, parameter, self.sharding, dim, owner)
            else:  # as it was, or what a script has put in its place
                param.sharded = parameter
            param.make_unsharded(self.sharding)
            param.places = own
            params.append(param)
        self.params = params

    def _owner_of(self, parameter: torch.nn.Parameter) -> torch.nn.Module | None:
        parts = (part for module in self.modules for part in module.modules())
        return next((m for m in parts if any(p is parameter for p in m._parameters.values())), None)

    def _dim_of(self, name: str, parameter: torch.nn.Parameter) -> int:
        num_ranks = self.sharding.shard.size() if self.sharding.shard else 1
        return dim_of(name, parameter, self.sharding.choose_placement, num_ranks)

    @property
    def module(self) -> torch.nn.Module:
        """The first of them."""
        return self.modules[0]

    def __deepcopy__(self, memo) -> WrappedModule:
        """Of a module whose parameters are whole; who copies it makes the unit of the copy."""
        made = WrappedModule.__new__(WrappedModule)
        memo[id(self)] = made
        modules, parameters, ignored, on_join = deepcopy(
            (self.modules, self.parameters, self.ignored, self.on_join), memo
        )
        made.__init__(modules, self.name, self.sharding, parameters, ignored, on_join=on_join)
        made.number, made.was_deferred = self.number, self.was_deferred
        return made

    @property
    def is_running(self) -> bool:
        """Whether parameters are whole, in a call of the module or of the model around it."""
        return self.made is not None and self.made.is_running

    @property
    def is_held(self) -> bool:
        """Whether a script wants whole parameters outside of the forward."""
        return self.made is not None and self.made.is_held

    def take_in(self, part: torch.nn.Module, tied: ShardedParam) -> None:
        """`part`, to which a script has given one of the unit's parameters, is of the unit too."""
        self.modules.append(part)
        part.__dict__[WRAPPED] = self
        part.__class__ = _sharded_class.class_like(self.module, type(part))
        tied.places += [(part._parameters, key) for key in part._parameters]
        self._take_rows()

    def _make_deferred(self) -> None:
        """Of what the module has by now: parameters may have been replaced, or tied."""
        announcing(self._find_and_make)()

    def _find_and_make(self) -> None:
        self.parameters = self.own_parameters()
        self.make()

    def own_parameters(self) -> list[tuple[str, torch.nn.Parameter]]:
        """What the modules have for parameters of the unit: others than before, or tied ones."""
        if not self.beside and self.main is None:
            return own_parameters_of(self.modules, self.ignored)
        return [(param.name, param.at_its_place()) for param in self.params]

    def run(self, forward, args, kwargs, module: torch.nn.Module | None = None):
        """`forward(*args, **kwargs)` with whole parameters; `module`: of several, whose it is."""
        if self.summoned:
            return self.summoned.run(self.name, forward, args, kwargs)
        model = self.model or join(self)
        for other in self.beside:
            forward = other.around(forward)
        sharding = self.sharding
        if sharding.cast_inputs or (self.is_root and sharding.cast_root_inputs):
            args, kwargs = cast((args, kwargs), sharding.param_dtype)
        args, kwargs = _pending_inputs.awaited(args, kwargs)
        try:
            with unchecked():
                if self.is_root and not self.is_running:
                    self.parts.withdraw()
                    self._check_parameters()
                    model = self.model
                unit = self.unit
                opened = self.open_units if self.is_root else None
                shared = self.open_units if module is not None and not self.is_root else None
                is_apart = shared is not None and not shared.enter(self)
                model.before_forward(unit, is_apart)
                if not sharding.use_dtensor and torch.is_autocast_cache_enabled():
                    torch.clear_autocast_cache()  # of torch's FSDP1 it has no weights, but views
        except BaseException as error:
            if self.is_root:
                model.report_error(f"in forward: {describe(error)}")
            raise
        if opened is not None:
            opened.begin()
        try:
            if not self.rows:
                for param in self.params:
                    param.annotate()
            output = handed_out(forward(*args, **kwargs), self.modules)
        except BaseException as error:
            if opened is not None:
                opened.fail(describe(error))
            if self.is_root and not self.sharding.use_dtensor:
                _hidden_shards.explain(error, self)
            model.forward_failed(unit, describe(error))
            raise
        with unchecked():
            if opened is not None:
                opened.end(output)
            if shared is not None and shared.leave(self, module):
                model.after_forward(unit, ())  # the call's; the unit's own follows
            model.after_forward(unit, output, is_apart)
            if self.is_root and not self.is_running:
                self.parts.offer()
                if self.discards:
                    _discarding.finish(self)
        return output

    def around(self, forward: Callable) -> Callable:
        """`forward` with whole parameters of this unit, too."""
        return lambda *args, **kwargs: self.run(forward, args, kwargs)

    def _parameters_of_unit(self) -> list[tuple[str, torch.nn.Parameter]]:
        if not self.sharding.use_dtensor:
            return self.parameters
        return [(param.name, param.unsharded) for param in self.params]

    def leaves(self) -> list[torch.nn.Parameter]:
        """What graphs of forwards lead to, in the order of the parameters."""
        return [parameter for _, parameter in self._parameters_of_unit()]

    def hold(self) -> None:
        """Whole parameters from now on, until the module's forward has ended; a collective."""
        for each in self.together:
            model_of(self).unshard(each.unit)

    def let_go(self) -> None:
        """Ends hold()."""
        for each in self.together:
            if each.is_held:
                each.model.reshard(each.unit)

    def groups(self) -> tuple:
        """C++ groups of the ranks that shard and replicate; either may be None."""
        return self.sharding.shard, self.sharding.replicate

    def adopt(self) -> None:
        """Takes over parameters that a script has converted, or put others in the place of."""
        if self.rows and _C.are_faces_settled(self.rows):
            return
        if all(param.is_settled() for param in self.params):
            return
        is_adopted = all(param.adopt(self.name) for param in self.params)
        self._take_rows()
        if is_adopted:
            return
        self.made = None  # of another dtype: the unit is made anew
        self._find_and_make()
        self.is_stale = True

    def extend(self) -> None:
        """Takes over what a script has made of the rows: with an all-gather of their own."""
        found = [p.extend(self.sharding, self._owner_of(p.sharded)) for p in self.params]
        if any(found):
            self.made = None
            self._find_and_make()

    def _check_parameters(self) -> None:
        """A parameter that was replaced would train unseen, on each rank by itself."""
        for wrapped in self.all_wrapped:
            if wrapped.params and not (wrapped.made and wrapped.made.is_whole):
                wrapped.adopt()  # whole: by unshard(), or amid a pass, which recomputes
            wrapped.check_places()
        if any(wrapped.is_stale for wrapped in self.all_wrapped):
            join(self)

    def check_places(self) -> None:
        """Refuses parameters that were replaced."""
        for registry, key, name, parameter in self.places:
            if registry.get(key) is not parameter:
                raise StateError(
                    f"libddp fsdp: unit {self.name!r}: parameter {name!r} was replaced "
                    "by another object after wrapping. Hint: write values in place (copy_), "
                    "or replace parameters before wrapping."
                )


def announcing(function):
    """The other ranks are told of an error in `function`, which wraps: they would wait for us."""

    @wraps(function)
    def announce(*args, **kwargs):
        try:
            return function(*args, **kwargs)
        except Exception as error:
            if not getattr(error, "_libddp_is_known", False):
                error._libddp_is_known = True
                for group in live_groups():
                    group.report_error(f"in wrapping: {describe(error)}")
            raise

    return announce


def attach(
    module: torch.nn.Module | list[torch.nn.Module],
    name: str,
    parameters,
    sharding: Sharding,
    ignored=None,
) -> WrappedModule:
    """Shards `parameters` as the unit of `module`, or of several; a collective.

    Args:
        ignored: parameters that are left alone; if given, a unit whose parameters are all on the
            meta device is made when they have values.
    """
    modules = module if isinstance(module, list) else [module]
    for each in modules:
        if wrapped_module_of(each) is not None:
            raise ArgumentError(
                f"libddp fsdp: module {name or type(each).__name__!r} is wrapped already. "
                "Hint: wrap each module once."
            )
    _refusals.check(modules, parameters)
    wrapped = WrappedModule(modules, name, sharding, parameters, list(ignored or ()))
    _shard(wrapped, may_wait=ignored is not None)
    for each in modules:
        each.__dict__[WRAPPED] = wrapped
    split_backward.put(_objection)
    return wrapped


def attach_beside(main: WrappedModule, name: str, parameters, sharding: Sharding) -> None:
    """Shards more parameters of the module, over other groups; a collective."""
    _refusals.check(main.modules, parameters)
    wrapped = WrappedModule(main.modules, name, sharding, parameters, main.ignored, main=main)
    _shard(wrapped, may_wait=True)
    main.beside.append(wrapped)


def _shard(wrapped: WrappedModule, may_wait: bool) -> None:
    """Now, or, if that may be, once the parameters have values."""
    wrapped.number = next_number()
    if may_wait:
        wrapped.was_deferred = bool(wrapped.parameters) and all(
            p.is_meta for _, p in wrapped.parameters
        )
        wrapped.was_deferred = is_deferred_everywhere(wrapped)
    if not wrapped.was_deferred:
        wrapped.make()
    else:
        wrapped.show_on_meta()


def _objection(module: torch.nn.Module) -> str | None:
    """See split_backward."""
    if next(wrapped_modules_in(module), None) is None:
        return None
    return "is sharded, so its weights are whole in whole passes only and would not be trained"


def next_number() -> int:
    """Of a step of wrapping."""
    return next(_numbers)


def is_deferred_everywhere(wrapped: WrappedModule) -> bool:
    """Whether all ranks have all parameters on the meta device: others shard, or refuse, now.

    Those that were there when the module was wrapped count, for newcomers among the ranks.
    """
    has_values = torch.full((1,), float(not wrapped.was_deferred), device="cpu")
    for group in wrapped.groups():
        if group is not None and group.size() > 1:
            group.all_reduce(has_values, op=dist.ReduceOp.SUM)
    return has_values.item() == 0


def _make_unit(**arguments):
    try:
        return _C.ParamGroup(**arguments)
    except Exception as error:
        error._libddp_is_known = True  # the ranks have told each other
        raise


def _places(modules: list[torch.nn.Module], parameters) -> list[tuple]:
    names = {id(parameter): name for name, parameter in parameters}
    parts = {part: None for module in modules for part in module.modules()}
    return [
        (part._parameters, key, names[id(parameter)], parameter)
        for part in parts
        for key, parameter in part._parameters.items()
        if id(parameter) in names
    ]


def join(root: WrappedModule):
    """Makes `root` the root of all units under it, those that had another root before too."""
    with unchecked():
        return _join(root)


def _join(root: WrappedModule):
    dynamo.keep_out("libddp.distributed.fsdp")
    wrapped_modules = [wrapped for module in root.modules for wrapped in wrapped_modules_in(module)]
    wrapped_modules = list(dict.fromkeys([root, *wrapped_modules]))
    for wrapped in wrapped_modules:
        _refusals.check_gradient_dtypes(wrapped.parameters)
    for wrapped in wrapped_modules:  # the old model lets go of its units first
        wrapped.forget_model()
    for wrapped in wrapped_modules:
        wrapped.extend()
    units = [wrapped.unit for wrapped in wrapped_modules]
    if any(wrapped.params for wrapped in wrapped_modules):
        root.faces = Faces(wrapped_modules)
    model = _C.ShardedModel(
        units,
        forward_prefetch=root.sharding.forward_prefetch,
        backward_prefetch=root.sharding.backward_prefetch,
        faces=root.faces,
    )
    for wrapped in wrapped_modules:
        wrapped.model, wrapped.root = model, root
    root.is_root, root.parts = True, RootParts(root)
    several = [wrapped for wrapped in wrapped_modules[1:] if len(wrapped.modules) > 1]
    if several:
        opened = OpenUnits()
        for wrapped in (root, *several):
            wrapped.open_units = opened
    _backward_errors.watch_root(root)
    if any(wrapped.sharding.compute_device is not None for wrapped in wrapped_modules):
        _offload.watch(root)
    group = root.sharding.shard
    if len(wrapped_modules) == 1 and group is not None and group.size() > 1 and group.rank() == 0:
        _one_unit_warning.warn_of_one_unit(root.module, root.parameters, root.unit)
    root.all_wrapped = wrapped_modules
    if not all(wrapped.syncs for wrapped in wrapped_modules):
        _gradient_sync.settle(root)
    for wrapped in wrapped_modules:
        if wrapped.on_join is not None:
            wrapped.on_join()
    return model


def model_of(wrapped: WrappedModule):
    """The C++ model; `wrapped` becomes the root of what is under it if nothing has run yet."""
    return wrapped.model or join(wrapped)


def cast(values, dtype: torch.dtype | None):
    """Floating-point tensors in `values` in another dtype."""
    if dtype is None:
        return values

    def to_dtype(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    return _apply_to_tensors(to_dtype, values)
