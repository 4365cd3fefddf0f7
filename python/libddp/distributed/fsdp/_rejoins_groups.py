"""FullyShardedDataParallel.rejoin: what its construction does with other ranks, once more."""

from __future__ import annotations

from functools import partial

from libddp.distributed.fsdp.wrap import (
    _comm_hooks,
    _conversion,
    _modules,
    _process_groups,
    _rejoin,
    _wrapped_module,
)
from libddp.distributed.fsdp.wrap._lookup import wrapped_modules_in
from libddp.distributed.fsdp.wrap._sharding import Sharding
from libddp.errors import ArgumentError


class RejoinsGroups:
    """The part of FullyShardedDataParallel that leaves a process group for another one."""

    @_wrapped_module.announcing
    def rejoin(self, process_group=None, device_mesh=None) -> None:
        """Goes on in another group, of any number of ranks: one of survivors and newcomers.

        Module, parameters (the same objects) and arguments stay; the old group may have failed, be
        destroyed, or be whole. Each rank owns other rows now, and those of before are gone with the
        old group: parameters are NaN, and optimizers have no state of them, until a snapshot or a
        state dict is loaded. Gradients are dropped. Buffers stay. `sync_module_states` is done
        again, so rank 0's buffers, and its NaN where it is no newcomer, are everybody's.

        Args:
            process_group, device_mesh: as at construction; None = the default group.

        Raises:
            StateError: this is not the outermost wrapped module; there is no default group.
            ArgumentError: units of the model are in different groups; HYBRID_SHARD without the two
                groups or a mesh that it needs; the ranks' modules differ.

        Note:
            A collective of the new group, the one that construction is: survivors call it where
            newcomers wrap their model. A communication hook stays; where its state, or
            `state.process_group`, is the old group, the new one takes its place.

        Example:
            >>> model.rejoin()                                                  # doctest: +SKIP
            >>> state = snapshot.load(model, optimizer)                         # doctest: +SKIP
        """
        modules = self.fsdp_modules(self)
        self._refuse_different_groups(modules)
        for module in modules:  # newcomers have not cast theirs yet
            _modules.cast_buffers(module._fsdp_wrapped_module, module._buffer_dtypes, None)
        by_wrapped = {id(module._wrapped): module for module in modules}

        def steps(wrapped: _wrapped_module.WrappedModule) -> list[_rejoin.Step]:
            module = by_wrapped[id(wrapped)]
            return [
                _rejoin.Step(
                    module._groups_number,
                    partial(module._change_groups, process_group, device_mesh),
                ),
                _rejoin.Step(wrapped.number, module._join_group),
            ]

        _rejoin.rejoin(self, steps)

    def _refuse_different_groups(self, modules: list) -> None:
        own = {id(module._wrapped) for module in modules}
        for module in modules:
            if module._given_groups != self._given_groups:
                raise ArgumentError(
                    f"libddp fsdp: rejoin(): unit {module._wrapped.name!r} is in another process "
                    f"group than {self._wrapped.name!r}, and one is given. Hint: wrap the model "
                    "anew."
                )
        for wrapped in wrapped_modules_in(self):
            if id(wrapped) not in own:
                raise ArgumentError(
                    f"libddp fsdp: rejoin(): {wrapped.name!r} was sharded by fully_shard, inside "
                    "of FullyShardedDataParallel. Hint: wrap the model anew."
                )

    def _change_groups(self, process_group, device_mesh) -> None:
        wrapped = self._wrapped
        before, mesh = self.process_group, wrapped.sharding.mesh
        device_type = "cpu" if mesh is None else mesh.device_type
        groups = _process_groups.groups_of(
            process_group, device_mesh, self.sharding_strategy, device_type
        )
        wrapped.sharding = self._in_low_precision().over(groups)
        if self._precisions is not None:
            full = self._precisions.full.over(groups)
            self._precisions = _conversion.Precisions(wrapped.sharding, full)
        self._note_groups(groups, _process_groups.known(process_group), device_mesh)
        if wrapped.hook is not None:
            after = groups.shard or groups.replicate
            wrapped.hook = _comm_hooks.after_move(wrapped.hook, before, after)

    def _in_low_precision(self) -> Sharding:
        """As newcomers are, who have not called eval() yet."""
        return self._wrapped.sharding if self._precisions is None else self._precisions.low

    def _join_group(self) -> None:
        wrapped = self._wrapped
        wrapped.leave_group()
        if self._sync_module_states:
            _modules.take_from_first(
                wrapped.parameters, self._fsdp_wrapped_module, *wrapped.groups()
            )
        wrapped.join_group()
