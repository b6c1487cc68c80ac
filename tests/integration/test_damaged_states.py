"""A state of a real run that loses a field loads as that of an older version, or is refused by the name of the field.

The state of a loader: tests/unit/loader/test_schema.py.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import pytest
from damage import changed, places
from measured_stages import STAGES
from trainer_runs import Data, fit

from lightning_echo import EchoCallback, EchoDataModule, EchoStateError, MetricGuard, StallAnalysis, TargetIdle
from lightning_echo.analysis.measured import CachedExample, Spread
from lightning_echo.analysis.predict import TrainingSetting
from lightning_echo.analysis.result import CheckedSetting, RankSeconds
from lightning_echo.measure.control import Observation, PipelineCosts
from lightning_echo.measure.summary import EpochReport, FactorUse, RunSummary


def controlled() -> TargetIdle:
    """A controller that has raised the factor in vain, and whose state has all its parts."""
    controller = TargetIdle(max_factor=8)
    factor = 1.0
    for epoch in range(6):
        costs = PipelineCosts("after_augmentation", 0.06, 0.001, 0.001, device_seconds=0.01, workers=2)
        seen = Observation(epoch, factor, steps=100, idle_fraction=0.6, step_seconds=0.03, costs=costs)
        factor = controller.decide(seen).factor
    return controller


def guarded() -> MetricGuard:
    guard = MetricGuard(controlled(), monitor="val_loss")
    guard.decide(Observation(0, 2.0, metrics={"val_loss": 1.0}, logged=frozenset({"val_loss"})))
    return guard


@cache
def callback_state() -> Any:
    callback = EchoCallback(TargetIdle(), factor=2, insertion_point="after_augmentation", buffer_size=8)
    fit(Data(), callbacks=[callback])
    state = callback.state_dict()
    assert state["reports"]
    assert state["decisions"]
    return {**state, "metrics": {"val_loss": (1.0, True)}}


@cache
def module_state() -> Any:
    return EchoDataModule(Data(), 2).state_dict()


@cache
def summary() -> str:
    reports = [EpochReport(0, 10, 2.0, 40, 40, passes=1.0, reason="custom")]
    return RunSummary(reports, [FactorUse(0, {"a": 0}, 2.0), FactorUse(4, 5, 3.0, "custom", "why")], {"torch": "2"}).to_json()


@cache
def analysis() -> str:
    with_cache = replace(STAGES, in_cache={"raw": CachedExample(100, Spread.exactly(0.001))}, examples=8, free_bytes=2**30)
    found = StallAnalysis(
        with_cache,
        Spread.exactly(0.2),
        Spread.exactly(0.1),
        {"RandomCrop": 0.001},
        ("a note",),
        (RankSeconds(0.1, 0.2), RankSeconds(0.2, 0.2)),
        (CheckedSetting(TrainingSetting(workers=2), Spread.exactly(0.1)),),
    )
    with TemporaryDirectory() as folder:
        found.to_json(Path(folder) / "analysis.json")
        return (Path(folder) / "analysis.json").read_text()


def read_analysis(state: Any) -> None:
    with TemporaryDirectory() as folder:
        (Path(folder) / "analysis.json").write_text(json.dumps(state))
        StallAnalysis.from_json(Path(folder) / "analysis.json")


class Kind(NamedTuple):
    """A kind of state.

    Attributes:
        state: Makes one.
        load: Loads it.
        error: What is raised if it cannot be loaded.
        may_lack: What may be missing, mostly names that the user has chosen.
    """

    state: Callable[[], Any]
    load: Callable[[Any], None]
    error: type[ValueError] = EchoStateError
    may_lack: str = "nothing"


KINDS = {
    "TargetIdle": Kind(lambda: controlled().state_dict(), lambda state: TargetIdle().load_state_dict(state)),
    "MetricGuard": Kind(
        lambda: guarded().state_dict(),
        lambda state: MetricGuard(TargetIdle(), monitor="val_loss").load_state_dict(state),
        may_lack=r"controller\.TargetIdle",  # another one was guarded
    ),
    "EchoCallback": Kind(
        callback_state,
        lambda state: EchoCallback(TargetIdle()).load_state_dict(state),
        may_lack=r"loader\..*|wrapped|metrics(\.val_loss)?|meter\.stages\..*|controller\.TargetIdle",
    ),
    "EchoDataModule": Kind(
        module_state, lambda state: EchoDataModule(Data(), 2).load_state_dict(state), may_lack=r"loader\..*|datamodule\..*"
    ),
    "echo_summary.json": Kind(
        lambda: json.loads(summary()),
        lambda state: RunSummary.from_json(json.dumps(state)) and None,
        ValueError,
        r"packages\..*|decisions\.\d+\.batch\.a",
    ),
    "analysis": Kind(
        lambda: json.loads(analysis()),
        read_analysis,
        ValueError,
        r"advice(\..*)?|transforms\.RandomCrop|stages\.in_cache\.raw",
    ),
}
WRONG: tuple[Any, ...] = ("wrong", -7.5, {"a": 1}, [1, 2, 3, 4], None, True, 3.5)
CASES = [pytest.param(kind, id=kind) for kind in KINDS]


@pytest.mark.parametrize("kind", CASES)
def test_a_state_that_lacks_a_field_is_refused_by_its_name(kind: str) -> None:
    state, load, error, may_lack = (made := KINDS[kind])._replace(state=made.state())
    load(state)
    refused = 0
    for path in places(state):
        damaged = changed(state, path, removes=True)
        text = ".".join(map(str, path))
        if re.fullmatch(may_lack, text):
            load(damaged)
            continue
        with pytest.raises(error, match=re.escape(str(path[-1]))) as raised:
            load(damaged)
        assert type(raised.value) is error, text
        refused += 1
    assert refused


@pytest.mark.parametrize("kind", CASES)
def test_a_field_of_another_type_leads_to_no_error_from_inside(kind: str) -> None:
    """Some values are of a right type by chance, and load."""
    state, load, error, _ = (made := KINDS[kind])._replace(state=made.state())
    turns = itertools.cycle(WRONG)  # two for each place
    tried = [changed(state, path, wrong) for path in places(state) for wrong in itertools.islice(turns, 2)]
    refused = [one for one in tried if was_refused(load, one, error)]
    assert len(refused) > len(tried) / 2


def was_refused(load: Callable[[Any], None], state: Any, error: type[ValueError]) -> bool:
    """Whether loading raises that error; any other one is raised from here."""
    try:
        load(state)
    except error as raised:
        return type(raised) is error or pytest.fail(f"an error from inside: {raised!r}")
    return False


@pytest.mark.parametrize("kind", [kind for kind, made in KINDS.items() if made.error is EchoStateError])
@pytest.mark.parametrize("state", [[], "state", 3])
def test_something_else_is_no_state(kind: str, state: Any) -> None:
    with pytest.raises(EchoStateError, match="state"):
        KINDS[kind].load(state)


def test_the_states_of_a_collection_that_are_no_dictionary_are_refused() -> None:
    run = fit(EchoDataModule(Data(), 2), max_epochs=1)
    for loaders in (3, "ab", [1]):
        with pytest.raises(EchoStateError, match="the state of EchoDataModule is damaged: loaders must be a dictionary, got"):
            run.data.load_state_dict({"datamodule": {}, "loader": {"loaders": loaders}})
