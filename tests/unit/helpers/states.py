"""States of an `EchoLoader`, made by hand."""

from typing import Any

from lightning_echo.insertion import InsertionPoint
from lightning_echo.loader.state import BufferState, EchoCounts, EchoState, FactorChange, PlanState
from lightning_echo.pipeline.pipelines import Layout, Start
from lightning_echo.plan.plan import Reuse


def echo_state(**changes: Any) -> EchoState:
    """The state of a run that has not begun, but for some fields."""
    fields: dict[str, Any] = {
        "insertion_point": InsertionPoint.after_augmentation,
        "layout": Layout(103, 2, 4, 4, 13),
        "workers": 0,
        "buffer_size": 16,
        "reuse": Reuse.each,
        "seed": 0,
        "factor": 2.0,
        "constructed_factor": 2.0,
        "largest_factor": 2.0,
        "factor_before": 2.0,
        "factor_since": 0,
        "epoch": 0,
        "epoch_batches": 0,
        "in_epoch": 0,
        "delivered": 0,
        "begin_at": Start(0, 0),
        "passes_over": 0,
        "counts": EchoCounts(),
        "plan": None,
        "order": None,
    }
    return EchoState(**{**fields, **changes})


def plan_state(position: int = 0, *, factor: float = 2.0, pending: tuple[tuple[int, float], ...] = ()) -> PlanState:
    """A plan in which nothing is live."""
    changes = tuple(FactorChange(*change) for change in pending)
    buffer = BufferState(live=(), uses_left=0, warming=False, owed=0, staggered=0, delivered=0, fresh=0)
    return PlanState(number=position, position=position, factor=factor, pending=changes, buffers=(buffer,))
