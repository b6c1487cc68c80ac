"""What the state of an `EchoLoader` consists of, field by field, and a check that names the field that is wrong.

A state comes from a file. What is wrong in it would otherwise show long after it was loaded, as an error about something else, or
as training on other data.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from lightning_echo.insertion import InsertionPoint
from lightning_echo.planning.ratio import MOST_FACTOR

__all__ = ["EchoStateError", "check_fields"]

_Check = Callable[[Any, str], None]
_MOST = 2**62  # of anything that is counted
_WAY_OUT = "Resume from another checkpoint, or start anew without the loader's state"


class EchoStateError(ValueError):
    """A state that cannot be gone on with."""


def check_fields(state: Mapping[str, Any], *, by_index: bool) -> None:
    """Checks a state of this version.

    Args:
        state: To be loaded.
        by_index: Whether the loader that loads it reads by index; else it reads batches, or a stream, pass after pass.

    Raises:
        EchoStateError: It is damaged; the message names the field.
    """
    _STATE(state, "")
    by_batches = InsertionPoint(state["insertion_point"]).by_batches
    plan, order, stream, layout = state["plan"], state["order"], state.get("stream"), state["layout"]
    _require((plan is None) == (order is None), "order", "there exactly where there is a plan", order)
    _require(stream is None or plan is None, "stream", "None beside a plan", stream)
    begins = plan is None and stream is None  # nothing is live
    number = state["begin_at"][1]
    _require(not begins or number == state["delivered"], "plan, or stream,", "there once batches were delivered", plan)
    if plan is not None:
        buffers = 1 if by_batches else max(state["workers"], 1)
        _require(len(plan["buffers"]) == buffers, "plan.buffers", f"a list of {buffers}", plan["buffers"])
        most = plan["number"] * (1 if by_batches else layout["batch_size"])
        _check_plan(plan, "plan", most)
        _check_order(order, plan, layout, by_index)
    if stream is not None:
        workers = max(state["workers"], 1)
        for name in ("batches", "workers"):
            _require(len(stream[name]) == workers, f"stream.{name}", f"a list of {workers}", stream[name])
        ended = stream["ended"]
        _require(all(worker < workers for worker in ended), "stream.ended", f"numbers below {workers}", ended)
        for number, worker in enumerate(stream["workers"]):
            if worker is not None:
                path, its = f"stream.workers[{number}].plan", worker["plan"]
                _require(len(its["buffers"]) == 1, f"{path}.buffers", "a list of 1", its["buffers"])
                _check_plan(its, path, its["number"] * layout["batch_size"])
                _check_pulled(worker["pulled"], its, f"stream.workers[{number}].pulled")
        since = stream["factors"][0][0] if stream["factors"] else None
        _require(since == stream["request"], "stream.factors", "a list that begins with the request", stream["factors"])


def _check_order(order: Mapping[str, Any], plan: Mapping[str, Any], layout: Mapping[str, Any], by_index: bool) -> None:
    """What the order of a plan must have."""
    if by_index:
        distances = order.get("distances")
        _require(bool(distances), "order.distances", "a list with an entry", distances)
    elif not layout["batches_per_pass"]:  # a pass ends where the loader's iteration does
        passes = order.get("passes")
        _require(bool(passes), "order.passes", "a list with an entry", passes)
        assert passes is not None
        follows = all(one[0] < other[0] and one[1] <= other[1] for one, other in pairwise(passes))
        _require(follows and passes[-1][1] <= plan["position"], "order.passes", "passes in order, begun already", passes)


def _check_pulled(pulled: Sequence[Sequence[int]], plan: Mapping[str, Any], path: str) -> None:
    """What was pulled from a stream is to be pulled again without a gap, and all that is live is among it."""
    ends = [position + wanted for position, wanted, *_ in pulled]
    starts = [*[row[0] for row in pulled[1:]], plan["position"]] if pulled else []
    follows = all(row[0] <= start <= end for row, start, end in zip(pulled, starts, ends, strict=True))
    live = [item[0] for buffer in plan["buffers"] for item in buffer["live"]]
    holds = not live or (bool(pulled) and pulled[0][0] <= min(live))
    _require(follows and holds, path, "rows without a gap, from the oldest live example on", pulled)


def _check_plan(plan: Mapping[str, Any], path: str, most: int) -> None:
    """What the fields of a plan say of each other; ``most`` fresh items can have been delivered in its batches."""
    _require(plan["position"] <= most, f"{path}.position", f"at most {most}, by its number of batches", plan["position"])
    for number, buffer in enumerate(plan["buffers"]):
        where, live = f"{path}.buffers[{number}].live", buffer["live"]
        uses = buffer.get("uses_left")
        _require(uses is None or uses == sum(item[1] for item in live), where, f"items with uses_left={uses} in all", live)
        for position, _, _, first, count in live:
            fits = first <= position < first + count and position < plan["position"]
            _require(fits, where, "items of positions before that of the plan, each in its call", (position, first, count))
        _require(len({item[0] for item in live}) == len(live), where, "items of different positions", live)


def _require(holds: bool, path: str, expected: str, value: Any) -> None:
    if not holds:
        raise EchoStateError(f"the state is damaged: {path or 'it'} must be {expected}, got {value!r:.80}. {_WAY_OUT}")


# --- checks of a value ----------------------------------------------------------------------------------------------


def _whole(least: int) -> _Check:
    def check(value: Any, path: str) -> None:
        is_whole = isinstance(value, int) and not isinstance(value, bool)
        _require(is_whole and least <= value <= _MOST, path, f"an integer >= {least}", value)

    return check


def _integer(value: Any, path: str) -> None:
    _require(isinstance(value, int) and not isinstance(value, bool), path, "an integer", value)


def _factor(value: Any, path: str) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    _require(is_number and 1 <= value <= MOST_FACTOR, path, f"a number from 1 to {MOST_FACTOR:,}", value)


def _truth(value: Any, path: str) -> None:
    _require(isinstance(value, bool), path, "True or False", value)


def _point(value: Any, path: str) -> None:
    known = [point.value for point in InsertionPoint if point is not InsertionPoint.auto]
    _require(isinstance(value, str) and value in known, path, f"one of {', '.join(known)}", value)


def _anything(value: Any, path: str) -> None:
    """The user's own."""


def _or_none(check: _Check) -> _Check:
    return lambda value, path: None if value is None else check(value, path)


def _row(**columns: _Check) -> _Check:
    def check(value: Any, path: str) -> None:
        _require(isinstance(value, list | tuple) and len(value) == len(columns), path, f"[{', '.join(columns)}]", value)
        for item, (name, column) in zip(value, columns.items(), strict=True):
            column(item, f"{path} ({name})")

    return check


def _list(check: _Check) -> _Check:
    def check_all(value: Any, path: str) -> None:
        _require(isinstance(value, list | tuple), path, "a list", value)
        for number, item in enumerate(value):
            check(item, f"{path}[{number}]")

    return check_all


def _fields(required: Mapping[str, _Check], **optional: _Check) -> _Check:
    def check(value: Any, path: str) -> None:
        _require(isinstance(value, Mapping), path, "a dictionary", value)
        if missing := [name for name in required if name not in value]:
            raise EchoStateError(f"the state is damaged: {path or 'it'} lacks {', '.join(missing)}. {_WAY_OUT}")
        for name, its in {**required, **optional}.items():
            if name in value:
                its(value[name], f"{path}.{name}" if path else name)

    return check


# --- the fields -----------------------------------------------------------------------------------------------------

_COUNT, _SIZE = _whole(0), _whole(1)
_PENDING = _list(_row(number=_COUNT, factor=_factor))
_LIVE = _list(_row(position=_COUNT, left=_SIZE, used=_SIZE, first=_COUNT, count=_SIZE))
_BUFFER = _fields(
    {"live": _LIVE, "warming": _truth, "owed": _integer, "staggered": _COUNT, "delivered": _COUNT, "fresh": _COUNT},
    uses_left=_COUNT,
)
_PLAN = _fields({"number": _COUNT, "position": _COUNT, "factor": _factor, "pending": _PENDING, "buffers": _list(_BUFFER)})
# Of an order that is shuffled here, of a sampler's, or of a loader that is never rebuilt.
_ORDER = _fields(
    {},
    distances=_list(_row(first=_COUNT, slots=_COUNT)),
    sampler=_list(_row(number=_COUNT, state=_anything)),
    passes=_list(_row(number=_COUNT, first=_COUNT)),
    loader=_fields({"position": _COUNT, "state": _anything}),
)
_STREAM_WORKER = _fields(
    {
        "plan": _PLAN,
        "ended": _whole(-1),
        "stream": _anything,
        "stream_pass": _whole(-1),
        "pulled": _list(_row(position=_COUNT, wanted=_COUNT, batch=_COUNT, number=_COUNT)),
    }
)
_STREAM = _fields(
    {
        "request": _COUNT,
        "pass": _COUNT,
        "begun": _truth,
        "ended": _list(_COUNT),
        "batches": _list(_COUNT),
        "workers": _list(_or_none(_STREAM_WORKER)),
        "factors": _list(_row(since=_COUNT, factor=_factor)),
        "pending": _PENDING,
    }
)
_LAYOUT = _fields(
    {"length": _COUNT, "replicas": _SIZE, "batch_size": _SIZE, "last_batch_size": _SIZE, "batches_per_pass": _COUNT}
)
_STATE = _fields(
    {
        "insertion_point": _point,
        "layout": _LAYOUT,
        "workers": _COUNT,
        "buffer_size": _SIZE,
        "seed": _or_none(_integer),
        "factor": _factor,
        "constructed_factor": _factor,
        "largest_factor": _factor,
        "epoch": _COUNT,
        "epoch_batches": _whole(-1),
        "in_epoch": _COUNT,
        "delivered": _COUNT,
        "factor_before": _factor,
        "factor_since": _COUNT,
        "begin_at": _row(position=_COUNT, number=_COUNT),
        "counts": _row(fresh=_COUNT, echoed=_COUNT, refetched=_COUNT),
        "plan": _or_none(_PLAN),
        "order": _or_none(_ORDER),
    },
    passes_over=_COUNT,
    stream=_or_none(_STREAM),
    epoch_goes_on=_or_none(_truth),
    trainer=_or_none(_fields({"in_epoch": _COUNT, "ended": _COUNT, "is_over": _truth, "in_step": _truth})),
)
