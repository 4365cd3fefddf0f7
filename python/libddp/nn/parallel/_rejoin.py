"""Going on in another process group: the same model, its parameters, optimizers and hooks.

What belonged to the group before (buckets, gradients, a pass that broke off) ends with it in C++,
see ReplicatedModel::rejoin; here is what Python keeps of it.
"""

from __future__ import annotations

from torch.distributed.algorithms.join import _JoinConfig

from libddp.distributed._groups import native
from libddp.errors import ArgumentError
from libddp.nn.parallel import _arguments, _options


class RejoinsGroups:
    """The part of DistributedDataParallel that leaves a process group for another one."""

    def rejoin(self, process_group=None) -> None:
        """Goes on in another group: one of survivors and newcomers, a smaller or a larger one.

        Module, parameters, optimizers, hooks and arguments stay; the old group may have failed, be
        destroyed, or be whole. All ranks start from rank 0's parameters and buffers as at
        construction, so load a snapshot afterwards. Gradients are dropped (`.grad` is None), they
        lie in the old group's memory; `require_backward_grad_sync` is True again, and a join
        context that broke off is over. A communication hook stays registered; where its state, or
        `state.process_group`, is the old group, the new one takes its place.

        Args:
            process_group: as at construction; None = the default group.

        Raises:
            ArgumentError: the ranks' models differ; the model has tensor parallelism around it
                (`device_mesh` is a slice), whose groups cannot be replaced: build it anew.
            StateError: there is no default group.

        Note:
            A collective of the new group, the one that construction is: survivors call it where
            newcomers wrap their model. After an `AdamW(shard_over=self)` was made, call its
            `rejoin()` next. Other optimizers keep what they have on this rank: where there is no
            snapshot to load, see docs/elastic.md.

        Example:
            >>> model.rejoin()                                         # doctest: +SKIP
            >>> state = snapshot.load(model, optimizer)                # doctest: +SKIP
        """
        self._check_may_rejoin()
        before = self.process_group
        self.process_group = _arguments.group_of(process_group, None)
        self.device_mesh = None
        for hook in self._comm_hooks:
            hook.follow(before, self.process_group)
        self._forget_iteration()
        self._join_group()

    def _check_may_rejoin(self) -> None:
        if self._is_sliced:
            raise ArgumentError(
                "libddp: DistributedDataParallel.rejoin(): the model was wrapped over a slice of a "
                "larger device mesh, and the groups of its other dimensions cannot be replaced. "
                "Hint: build the model and its tensor parallelism anew."
            )

    def _forget_iteration(self) -> None:
        """What an iteration that broke off may have left."""
        self.require_backward_grad_sync = True
        self.require_forward_param_sync = True
        self._divide_by_initial_world_size = True
        self._join_config = _JoinConfig.construct_disabled_join_config()  # torch leaves it on
        self._buffer_futures = []
        self._is_sharded = False
        if hasattr(self, "_stepped"):
            self._stepped.clear()

    def _join_group(self) -> None:
        parameters = self._tensors(self.module.named_parameters())
        _arguments.check_module(self.module, parameters)
        self._assign_modules_buffers()
        options = _options.native_options(self, parameters, self.init_sync, self._init_sync_buffers)
        # Those of newcomers, who may not have changed them yet.
        for name, value in self._options_of_construction.items():
            setattr(options, name, value)
        self._replica.rejoin(
            native(self.process_group), buffers=list(self._named_buffers()), options=options
        )
