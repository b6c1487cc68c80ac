"""`AskingSteps`: after which steps a controller is asked within an epoch.

After these steps the ranks exchange what they have measured. So all ranks must find the same answer without asking each other.
Therefore the answer depends only on numbers of batches. What may differ between ranks is agreed upon when training begins.
"""

from __future__ import annotations

from collections.abc import Callable

from lightning_echo.loading.loader import EchoLoader
from lightning_echo.measuring.control import Controller, Moment, as_count
from lightning_echo.training.collection import Echoed, parts_of

__all__ = ["SETTLING_STEPS", "AskingSteps"]

SETTLING_STEPS = 10  # after the queued batches: by then, the device's caches are warm and the thread's queue has settled


class AskingSteps:
    """Counts the steps of a ``fit``.

    Args:
        controller: The controller; None: there is no controller to ask.

    Attributes:
        first_after_steps: The controller's attribute: the number of steps that the early decision is based on.
        has_asked: Whether the controller has been asked in this run.

    Raises:
        TypeError: The controller's numbers of steps are not integers.
        ValueError: They are below 1.
    """

    def __init__(self, controller: Controller | None) -> None:
        name = type(controller).__name__
        self.first_after_steps = as_count(f"{name}.first_after_steps", getattr(controller, "first_after_steps", None))
        self._every = as_count(f"{name}.every_n_steps", getattr(controller, "every_n_steps", None))
        self._asked_after = frozenset(getattr(controller, "asked_after", ()))
        self.has_asked = False
        self._is_possible = False
        self._steps = 0  # in this fit
        self._early_at: int | None = None  # the same number at which the early decision is due

    def start(self, loader: Echoed | None, largest: Callable[[int], int]) -> None:
        """Begins to count, or continues after a resume. All ranks must call this together.

        Args:
            loader: What is trained on.
            largest: Returns the largest of the ranks' values.
        """
        parts = parts_of(loader).values()
        # Lightning can be told of another length of epochs only between two epochs.
        self._is_possible = bool(parts) and all(part.epoch_length == "fixed" or not part.has_length for part in parts)
        self._steps, self._early_at = 0, None
        if self._is_possible and self.first_after_steps is not None and not self.has_asked:
            self._early_at = largest(max(map(_unsettled, parts))) + SETTLING_STEPS + self.first_after_steps

    def after_step(self, in_epoch: int, in_run: int, *, ends_epoch: bool) -> Moment | None:
        """Returns why the controller is asked after a step; None: it is not asked. Call it after each step.

        Args:
            in_epoch: Number of batches of the epoch so far.
            in_run: Number of batches of the run so far.
            ends_epoch: Whether the epoch is over. The controller is then asked anyway.
        """
        self._steps += 1
        if not self._is_possible or ends_epoch:
            return None
        if (self._every is not None and in_epoch % self._every == 0) or in_run in self._asked_after:
            return Moment.within_epoch
        return Moment.early if self._steps == self._early_at and not self.has_asked else None


def _unsettled(loader: EchoLoader) -> int:
    """Returns how many of the next batches tell nothing, because queues held them at the start, or because they fill a buffer."""
    return max(loader.planned_ahead, loader.settled_at - loader.delivered_batches)
