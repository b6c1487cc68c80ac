"""On demand: what the verdict says, what a summary adds up, and how `MetricGuard` bounds the uses."""

from __future__ import annotations

import pytest

from lightning_echo.measure.advice import Waiting, advise_on_demand
from lightning_echo.measure.control import Controller, Decision, Observation, PipelineCosts, Reason
from lightning_echo.measure.guard import FactorSchedule, MetricGuard
from lightning_echo.measure.report import draw, report, tables
from lightning_echo.measure.summary import EpochReport, FactorUse, RunSummary, RunVerdict, summarize
from lightning_echo.measure.target_idle import TargetIdle


def epoch(number=0, uses=4.0, steps=100, bound=8.0, before=0, **values):
    """An epoch of ``steps`` batches of 8, of which one in ``uses`` is fresh. ``before``: steps of earlier epochs, alike."""
    examples = 8 * (before + steps)
    fresh = round(examples / uses)
    return EpochReport(number, steps, uses, fresh, examples - fresh, max_factor=bound, effective_factor=uses, **values)


def seen(idle, bound=8.0, costs=None, steps=100):
    return Observation(epoch=0, factor=bound, steps=steps, idle_fraction=idle, step_seconds=0.02, costs=costs)


def costs(point="before_augmentation", *, source=0.01, rest=0.0, collate=0.0, workers=2):
    return PipelineCosts(point, source, rest, collate, device_seconds=0.02, workers=workers)


def test_the_verdict_says_how_many_batches_were_fresh_and_claims_no_speed_up():
    verdict = advise_on_demand([epoch(steps=200), epoch(1, steps=200, before=200)], seen(0.01))
    assert verdict.message == (
        "400 steps while the source delivered 100 fresh batches: the accelerator is busy 99% of the time (last 100 steps)."
    )
    assert verdict.why == (
        "idle 1% (last 100 steps)",
        "each step: 19.8 ms compute, 0.2 ms waiting for data",
        "4 uses per fresh example, at most 8",
    )
    assert verdict.next_line == ""


@pytest.mark.parametrize("idle", [0.0, 0.03, 0.2, 0.9])
@pytest.mark.parametrize("uses", [1.0, 1.1, 2.0, 8.0])
@pytest.mark.parametrize("can_arrive", [True, False])
def test_no_verdict_on_demand_names_a_factor_or_a_speed_up(idle, uses, can_arrive):
    verdict = advise_on_demand([epoch(uses=uses)], seen(idle, costs=costs()), 8, {"factor": "demand"}, can_arrive=can_arrive)
    said = " ".join((verdict.message, *verdict.why, verdict.next_line))
    assert "times as fast" not in said
    assert "Echo with factor" not in said
    assert "Keep factor" not in said


def test_if_nothing_was_echoed_it_says_that_this_cost_nothing():
    verdict = advise_on_demand([epoch(uses=1.0)], seen(0.01))
    assert verdict.message.startswith("The source kept up: nothing was echoed, and factor='demand' costs nothing then;")
    assert verdict.why[-1] == "1 use per fresh example, at most 8"
    few = advise_on_demand([epoch(uses=1.01)], seen(0.01))
    assert (
        few.message
        == "100 steps while the source delivered 99 fresh batches: the accelerator is busy 99% of the time (last 100 steps)."
    )


@pytest.mark.parametrize(
    ("bound", "uses", "pipeline", "reason"),
    [
        pytest.param(8.0, 7.9, None, "were used as often as max_factor=8 allows", id="used up"),
        pytest.param(2.0, 1.9, costs(rest=1.0), "were used as often as max_factor=2 allows", id="used up, whatever else is slow"),
        pytest.param(8.0, None, None, "were used as often as max_factor=8 allows", id="none was fresh"),
        pytest.param(1.0, 1.0, None, "with max_factor=1 nothing is echoed", id="no echoes are allowed"),
        pytest.param(
            8.0,
            2.0,
            costs(rest=0.1),
            "takes 50 ms per batch, and a step 20 ms, so echo at insertion_point='after_augmentation', or use more workers",
            id="augmentation takes too long",
        ),
        pytest.param(
            8.0,
            2.0,
            costs("after_augmentation", collate=0.1),
            "takes 50 ms per batch, and a step 20 ms, so use more workers",
            id="nothing later helps",
        ),
        # Of two workers 42 ms each are 21 ms per batch: a step of 20 ms then idles less than 5%.
        pytest.param(8.0, 2.0, costs(rest=0.042), "either a single read held up its worker", id="augmentation is fast enough"),
        pytest.param(8.0, 2.0, None, "a larger buffer_size helps", id="something else"),
    ],
)
def test_if_the_training_waited_it_says_why(bound, uses, pipeline, reason):
    last = epoch(uses=uses or 4.0, bound=bound)
    last = EpochReport(**{**last.state(), "effective_factor": uses})
    message = advise_on_demand([last], seen(0.3, bound, pipeline)).message
    assert ", and yet the training waited: the accelerator is busy 70% of the time (last 100 steps); " in message
    assert reason in message


@pytest.mark.parametrize(
    ("reads", "helps"),
    [
        ("examples", "(more workers or reads_in_flight help)"),
        ("calls", "(more workers or a larger prefetch_factor help)"),
        ("stream", "(more workers help)"),
        ("batches", "either copies of whole batches take long beside such steps, or the source stalled"),
    ],
)
def test_where_no_thread_may_read_reads_in_flight_are_not_advised(reads, helps):
    message = advise_on_demand([epoch(uses=2.0)], seen(0.5), 8, reads=reads).message
    assert helps in message
    assert ("reads_in_flight" in message) is (reads == "examples")


def test_without_workers_they_come_first():
    verdict = advise_on_demand([epoch(uses=1.0)], seen(0.5, costs=costs(source=0.04, workers=0)), 8, can_arrive=False)
    assert verdict.message.startswith("Set num_workers to 2 or more first")
    assert verdict.next_line == "num_workers=2"


def test_reads_in_flight_are_advised_where_workers_wait_and_threads_may_read():
    chosen = {"factor": "demand", "cache": "8GiB"}
    waits = advise_on_demand([epoch()], seen(0.0), 8, chosen, Waiting(0.8, may_read_ahead=True))
    assert "the workers wait 80% of their time" in waits.message
    assert waits.next_line == 'EchoCallback(factor="demand", cache="8GiB", reads_in_flight=64)'
    for waiting in (None, Waiting(0.8, may_read_ahead=False), Waiting(0.3, may_read_ahead=True)):
        assert advise_on_demand([epoch()], seen(0.0), 8, chosen, waiting).next_line == ""


def test_what_is_possible_and_makes_more_examples_fresh_is_advised_in_its_order():
    known = Waiting(0.8, may_read_ahead=True, workers=2, cached_fraction=0.5)
    # Two workers take 90 ms for a batch, that is 45 ms, for steps of 20 ms: five keep up. A cache of half saves a third.
    starved = seen(0.0, costs=costs(source=0.06, rest=0.03))
    found = advise_on_demand([epoch()], starved, 8, {"factor": "demand"}, known)
    assert found.message.endswith(", and the workers wait 80% of their time; more workers would make more of them fresh.")
    assert found.next_line == "num_workers=5"
    assert found.others == (
        'EchoCallback(factor="demand", reads_in_flight=64)',
        'EchoCallback(factor="demand", cache=0.5)',
    )
    fed = seen(0.0, costs=costs(source=0.02))
    assert advise_on_demand([epoch()], fed, 8, {"factor": "demand"}, known).others == ()
    assert advise_on_demand([epoch()], fed, 8, {"factor": "demand"}, known).next_line == ""


def test_cores_of_other_machines_are_named_where_processors_make_too_few_fresh_examples():
    """460 ms of processor time a batch in steps of 20 ms: 23 cores. 27% from elsewhere cost a millisecond here."""
    known = Waiting(0.0, may_read_ahead=False, workers=16, batch_size=8)
    starved = seen(0.0, costs=costs(source=0.46, workers=16))
    end = (
        "(last 100 steps). Feeding it without echoes takes 23 cores, and this machine has 16: 7 on other machines would "
        'do, with ShareConfig("train", cluster="ray", cluster_workers=7).'
    )
    assert advise_on_demand([epoch()], starved, 16, {}, known).message.endswith(end)
    for uses, waiting, cores, chosen in (
        (1.1, known, 16, {}),
        (4.0, None, 16, {}),
        (4.0, known, 24, {}),
        (4.0, known, 16, {"share": "a"}),
    ):
        assert "other machines" not in advise_on_demand([epoch(uses=uses)], starved, cores, chosen, waiting).message


def test_the_summary_has_the_uses_of_all_epochs_with_one_bound_and_the_seconds_bridged():
    first = epoch(0, 4.0, idle_fraction=0.0, data_wait_seconds=0.0, step_seconds=0.02, stalls_bridged_seconds=6.0)
    second = epoch(1, 2.0, idle_fraction=0.0, data_wait_seconds=0.0, step_seconds=0.02, stalls_bridged_seconds=8.0)
    lowered = epoch(2, 1.5, bound=2.0, idle_fraction=0.0, stalls_bridged_seconds=8.5)
    lines = summarize([first, second, lowered], RunVerdict("")).splitlines()
    assert "  epochs 0 to 1: on demand, 2.67 uses per fresh example (at most 8), idle 0%" in lines
    assert any(line.startswith("  epoch 2: on demand, 1.5 uses per fresh example (at most 2)") for line in lines)
    assert "  echoes bridged about 8.5 s of stalls (estimated: so much longer without them)" in lines
    assert not any("times as fast" in line for line in lines)
    assert not any("bridged" in line for line in summarize([epoch(uses=1.0)], RunVerdict("")).splitlines())


def test_a_report_shows_bounds_as_bounds_and_draws_the_uses():
    uses = [FactorUse(0, 0, 8.0), FactorUse(100, 104, 2.0, "guarded", "val_loss 2, best 1: at most max_factor 2 instead of 8")]
    summary = RunSummary([epoch(), epoch(1, 2.0, bound=2.0, before=100)], uses)
    (factors,) = [table for table in tables(summary) if table.title == "Factors"]
    assert factors.columns[1] == "max_factor"
    assert "max_factor" in report(summary)
    pytest.importorskip("matplotlib")
    panel = draw(summary).axes[0]
    assert panel.get_title(loc="left") == "uses per fresh example"
    assert list(panel.lines[0].get_ydata()) == [4.0, 4.0, 2.0, 2.0]


# ---------------------------------------------------------------------- controllers


def asked(guard: Controller, bound: float, uses: float | None, loss: float, number: int = 0) -> Decision:
    logged = frozenset({"val_loss"})
    return guard.decide(Observation(number, bound, metrics={"val_loss": loss}, logged=logged, mean_uses=uses))


def bounds(guard: Controller, *epochs: tuple[float, float]) -> list[float]:
    """The bounds that follow from the uses and the loss of each epoch, beginning with 8."""
    found = [8.0]
    for number, (uses, loss) in enumerate(epochs):
        found.append(asked(guard, found[-1], min(uses, found[-1]), loss, number).factor)
    return found[1:]


def test_a_guard_lowers_the_bound_from_the_uses_of_the_epoch():
    assert bounds(MetricGuard(patience=1), (3.0, 1.0), (3.0, 2.0)) == [8, 1.5]
    assert bounds(MetricGuard(FactorSchedule({0: 8.0}), patience=1), (8.0, 1.0), (8.0, 2.0)) == [8, 4]


def test_a_ceiling_above_the_uses_is_lowered_from_these_too():
    falls = bounds(MetricGuard(patience=1, shrink=0.75), (6.0, 1.0), (6.0, 2.0), (2.0, 2.0), (1.5, 2.0))
    assert falls == [8, 4.5, 1.5, 1.125]


def test_while_the_metric_improves_the_bound_comes_back():
    assert bounds(MetricGuard(patience=1), (4.0, 2.0), (4.0, 3.0), (2.0, 1.0), (4.0, 0.5)) == [8, 2, 8, 8]


def test_the_reason_speaks_of_max_factor():
    guard = MetricGuard(patience=1)
    asked(guard, 8.0, 4.0, 1.0)
    decision = asked(guard, 8.0, 4.0, 2.0)
    assert decision == Decision(2.0, Reason.guarded, "val_loss 2, best 1: at most max_factor 2 instead of 8")


def test_without_a_controller_it_guards_the_factor_that_the_run_began_with_also_after_a_resume():
    guard = MetricGuard(patience=1)
    assert [asked(guard, factor, None, loss).factor for factor, loss in ((4.0, 1.0), (4.0, 2.0))] == [4, 2]
    resumed = MetricGuard(patience=1)
    resumed.load_state_dict(guard.state_dict())
    assert asked(resumed, 2.0, None, 0.5).factor == 4
    assert repr(resumed).startswith("MetricGuard(None, monitor='val_loss'")


def test_what_decides_on_a_factor_cannot_drive_loaders_on_demand():
    assert TargetIdle().why_not_on_demand
    assert MetricGuard(TargetIdle()).why_not_on_demand == TargetIdle().why_not_on_demand
    assert not MetricGuard().why_not_on_demand
    assert not FactorSchedule({0: 2.0}).why_not_on_demand


def test_a_replay_gets_no_advice_for_a_run_that_measures():
    """Its echoes are those of a journal, and it waits for what the journal says."""
    for idle in (0.0, 0.3, 0.9):
        verdict = advise_on_demand([epoch()], seen(idle), 8, {}, Waiting(0.9, may_read_ahead=True), repeats=True)
        assert verdict.message == (
            "100 steps while the source delivered 25 fresh batches, as in the run that was repeated. A replay echoes what its "
            "journal says, however fast the source is: advice follows from that run's summary."
        )
        assert verdict.next_line == ""
    assert advise_on_demand([epoch()], seen(0.9), 8, can_arrive=False, repeats=True).next_line == ""


@pytest.mark.parametrize(("uses", "bound", "said"), [(1.03, 1.0, "max_factor 1 at the end"), (1.0, 1.0, "at most 1")])
def test_uses_above_the_bound_at_the_end_are_not_called_at_most_that(uses, bound, said):
    """The bound fell during the run, or an account that was earned before was spent."""
    reports = [epoch(uses=uses, bound=bound, idle_fraction=0.0, data_wait_seconds=0.0, step_seconds=0.02)]
    verdict = advise_on_demand(reports, seen(0.0, bound))
    assert verdict.why[-1].endswith(f"per fresh example, {said}")
    assert f" per fresh example ({said})" in summarize(reports, verdict)


@pytest.mark.parametrize("bound", [1.0, 2.0])
def test_a_bound_that_a_controller_has_lowered_is_not_blamed_on_the_user(bound):
    waited = [EpochReport(**{**epoch(uses=bound, bound=bound).state(), "effective_factor": bound})]
    lowered = advise_on_demand(waited, seen(0.3, bound), decided_by="MetricGuard").message
    assert f"max_factor={bound:g}, which MetricGuard has set" in lowered
    assert "faster source" in lowered
    assert "larger" not in lowered
    assert "larger" in advise_on_demand(waited, seen(0.3, bound)).message
