"""Backward passes that the script ends itself, so that communication outlasts them."""

from __future__ import annotations


class FinishesByHand:
    """Part of DistributedDataParallel; see torch's attributes of the same names."""

    @property
    def require_manual_backward_finalization(self) -> bool:
        """Whether `finalize_backward` ends a synchronising backward, instead of backward itself.

        In between, communication goes on while the script does something else. To be set between
        passes, on every rank.
        """
        return self._require_manual_backward_finalization

    @require_manual_backward_finalization.setter
    def require_manual_backward_finalization(self, required: bool) -> None:
        self._replica.set_manual_finish(required)
        self._require_manual_backward_finalization = required

    @property
    def should_finalize_after_backward(self) -> bool:
        """False where `finalize_backward` may be called in a hook of the last gradient already."""
        return self._replica.finishes_after_backward()

    def finalize_backward(self) -> None:
        """Waits for the gradients of the last backward and puts their averages into `.grad`.

        Raises:
            StateError: finalization is not manual, no pass waits for it, or gradients are missing.
        """
        self._replica.finish_backward()
