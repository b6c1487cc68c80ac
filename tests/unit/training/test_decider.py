"""What a controller is shown at an epoch's end and what becomes of its decision, with a fake Trainer of one or more ranks."""

from types import SimpleNamespace

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch.utils.data import DataLoader

from lightning_echo import Controller, EchoLoader, FactorSchedule, TargetIdle
from lightning_echo.measure.control import Decision, Moment, PipelineCosts, Reason
from lightning_echo.measure.timing import JobSteps
from lightning_echo.share.sharing import LoaderSharing
from lightning_echo.training.counts import Decider, _within_surplus

STEPS = JobSteps(steps=40, idle_fraction=0.25, slowest_rank=1, wait_seconds=0.005, busy_seconds=0.015)
COSTS = PipelineCosts("after_augmentation", 0.04, 0.0, 0.0, device_seconds=0.015, workers=2)


def measures(judged=STEPS, costs=COSTS):
    return judged, costs


class Rank:
    """A Trainer and a module of one rank of a job; what other ranks broadcast and hold is given.

    Args:
        metrics: Logged on this rank, by name.
        others: For each further rank what it has logged.
        said_by_zero: What rank 0 broadcasts, one after the other; None: this is rank 0.
    """

    def __init__(self, metrics, others=(), said_by_zero=None, enable_validation=True):
        self.others, self.said = list(others), None if said_by_zero is None else list(said_by_zero)
        self.heard = []
        self.trainer = SimpleNamespace(
            callback_metrics={},
            enable_validation=enable_validation,
            strategy=SimpleNamespace(broadcast=self.broadcast),
            fit_loop=SimpleNamespace(total_batch_idx=159),
        )
        self.module = SimpleNamespace(device=torch.device("cpu"), all_gather=self.all_gather)
        self.log(**metrics)

    def log(self, **metrics):
        self.trainer.callback_metrics.update({name: torch.tensor(value) for name, value in metrics.items()})

    def broadcast(self, value):
        self.heard.append(value)
        return value if self.said is None else self.said.pop(0)

    def all_gather(self, values):
        if not self.others:
            return values  # as Lightning does in a single process
        names = self.heard[0] if self.said is None else self.names
        rows = [[other.get(name, float("nan")) for name in names] for other in self.others]
        return torch.stack([values, *(torch.tensor(row, dtype=values.dtype) for row in rows)])

    def observe(self, decider, its_measures=None, epoch=3, factor=2.0, **options):
        return decider.observe(self.trainer, self.module, epoch, factor, its_measures or measures(), **options)


class Fixed(Controller):
    """Remembers what it saw."""

    def __init__(self, factor=3.0):
        self.factor, self.seen = factor, []

    def decide(self, observation):
        self.seen.append(observation)
        return Decision(self.factor, Reason.custom, f"I say {self.factor:g}")

    def state_dict(self):
        return {"factor": self.factor}

    def load_state_dict(self, state_dict):
        self.factor = state_dict["factor"]


def echo_loader(**options):
    return EchoLoader(DataLoader(torch.arange(64), 16), 1, insertion_point="after_augmentation", **options)


def test_a_controller_without_a_loader_to_drive_is_refused_with_a_hint():
    with pytest.raises(MisconfigurationException, match=r"TargetIdle\(.*EchoLoader\(loader, 1\)"):
        Decider(TargetIdle()).check(SimpleNamespace(lr_scheduler_configs=[]), None)
    Decider(None).check(SimpleNamespace(lr_scheduler_configs=[]), None)


def test_a_factor_that_the_buffer_could_not_hold_is_found_before_training():
    loader = echo_loader(buffer_size=8)  # factor 2 needs half a batch
    Decider(FactorSchedule({0: 1.0, 3: 2.0})).check(SimpleNamespace(lr_scheduler_configs=[]), loader)
    with pytest.raises(ValueError, match="buffer_size"):
        Decider(FactorSchedule({0: 1.0, 3: 8.0})).check(SimpleNamespace(lr_scheduler_configs=[]), loader)
    Decider(Fixed(8.0)).check(SimpleNamespace(lr_scheduler_configs=[]), loader)  # which does not say how far it would go
    assert loader.factor == 1


def test_an_observation_holds_what_was_measured_with_the_factor_in_force():
    seen = Rank({}).observe(Decider(None))
    assert (seen.epoch, seen.factor, seen.costs) == (3, 2.0, COSTS)
    assert (seen.steps, seen.idle_fraction, seen.step_seconds) == (40, 0.25, 0.02)
    assert (seen.batches, seen.moment, seen.idle_low) == (160, Moment.epoch_end, None)
    early = Rank({}).observe(Decider(None), measures(STEPS._replace(idle_low=0.125)), moment=Moment.early)
    assert (early.batches, early.moment, early.idle_low) == (160, Moment.early, 0.125)


def test_metrics_are_all_that_was_logged_but_echoing_s_own():
    seen = Rank({"val_loss": 0.5, "train_loss": 0.25, "echo/idle_fraction": 0.75}).observe(Decider(Fixed()))
    assert seen.metrics == {"val_loss": 0.5, "train_loss": 0.25}
    assert seen.logged == {"val_loss", "train_loss"}


def test_without_a_controller_nothing_is_read_of_what_was_logged():
    """Reading joins a metric over the ranks; nobody would see it."""
    rank = Rank({"val_loss": 0.5}, others=[{"val_loss": 1.0}])
    del rank.trainer.callback_metrics
    seen = rank.observe(Decider(None))
    assert (seen.metrics, seen.logged, rank.heard) == ({}, frozenset(), [])
    assert Decider(None).metrics_state(rank.trainer) == {}


def test_what_rank_0_has_logged_counts_for_all_ranks():
    """``self.log(..., rank_zero_only=True)`` leaves the other ranks without it."""
    rank = Rank(
        {"late": 9.0, "val_loss": 4.0},
        others=[{"absent": 7.0, "val_loss": 2.0}],
        said_by_zero=[["absent", "val_loss"], ["val_loss"]],
    )
    rank.names = ["absent", "val_loss"]
    seen = rank.observe(Decider(Fixed()))
    assert seen.metrics == pytest.approx({"absent": 7.0, "val_loss": 3.0})
    assert seen.logged == {"val_loss"}
    assert rank.heard[0] == ["late", "val_loss"]


def test_a_metric_counts_as_logged_once_also_if_it_is_logged_anew_with_an_equal_value():
    rank, decider = Rank({"val_loss": 0.5, "train_loss": 1.0}), Decider(Fixed())
    assert rank.observe(decider).logged == {"val_loss", "train_loss"}
    rank.log(train_loss=1.0)
    assert rank.observe(decider).logged == {"train_loss"}
    assert rank.observe(decider).logged == frozenset()
    rank.log(val_loss=0.5)
    seen = rank.observe(decider)
    assert seen.logged == {"val_loss"}
    assert seen.metrics == {"val_loss": 0.5, "train_loss": 1.0}  # the old ones are still shown


@pytest.mark.parametrize(("has_run", "enabled", "expected"), [(0, 1, False), (1, 1, True), (0, 0, True)])
def test_validation_is_waited_for_unless_it_is_switched_off(has_run, enabled, expected):
    decider = Decider(None)
    decider.validated = bool(has_run)
    assert Rank({}, enable_validation=bool(enabled)).observe(decider).validated is expected


def test_the_decision_of_rank_0_counts_on_every_rank_and_each_controller_is_asked():
    zero, one = Rank({}), Rank({}, said_by_zero=[[], [], (4.0, "starved", "of rank 0", 170)])
    of_zero, of_one = (3.0, Reason.custom, "I say 3", None), (4.0, Reason.starved, "of rank 0", 170)
    for rank, expected in ((zero, of_zero), (one, of_one)):
        controller = Fixed(3.0)
        decider = Decider(controller)
        observation = rank.observe(decider)
        decision = decider.decide(rank.trainer, observation)
        assert (decision.factor, decision.reason, decision.message, decision.since) == expected
        assert controller.seen == [observation]
    assert zero.heard[-1] == (3.0, "custom", "I say 3", None), "plain types go over the wire"


def test_what_is_no_decision_is_refused_by_the_name_of_the_controller():
    class Number(Fixed):
        def decide(self, observation):
            return 2.0

    rank, decider = Rank({}), Decider(Number())
    with pytest.raises(TypeError, match=r"Number.decide must return a Decision, got 2.0"):
        decider.decide(rank.trainer, rank.observe(decider))


def test_the_last_epochs_survive_a_checkpoint(tmp_path):
    rank, decider, other = Rank({}), Decider(None), Decider(None)
    few = JobSteps(steps=3, idle_fraction=0.5, slowest_rank=0, wait_seconds=0.01, busy_seconds=0.01)
    decider.joined_with_recent(rank.observe(decider, measures(few)))
    torch.save(decider.recent_state(), tmp_path / "recent.pt")
    other.load_recent_state(torch.load(tmp_path / "recent.pt", weights_only=True))
    assert other.joined_with_recent(rank.observe(other, measures(few))).steps == 6


def test_the_state_goes_to_a_controller_of_the_same_kind_alone():
    state, same, other = Decider(Fixed(7.0)).state_dict(), Fixed(1.0), Fixed(1.0)
    Decider(same).load_state_dict(state)
    assert (state, same.factor) == ({"Fixed": {"factor": 7.0}}, 7.0)
    Decider(other).load_state_dict(Decider(TargetIdle()).state_dict())
    assert other.factor == 1.0
    Decider(None).load_state_dict({"Fixed": {"factor": 7.0}})
    assert Decider(None).state_dict() == {}
    Decider(other).load_state_dict({})
    assert other.factor == 1.0


@pytest.mark.parametrize(
    ("most", "before", "wanted", "reason", "expected"),
    [
        (2.0, 1.0, 3.0, Reason.starved, (2.0, Reason.at_maximum)),
        (2.0, 2.5, 3.0, Reason.starved, (2.5, Reason.at_maximum)),  # what is set may stay
        (2.0, 2.5, 2.4, Reason.cheaper_source, (2.4, Reason.cheaper_source)),
        (2.0, 1.0, 1.5, Reason.starved, (1.5, Reason.starved)),
        (2.0, 1.0, 3.0, Reason.scheduled, (3.0, Reason.scheduled)),  # who says a factor gets it
        (None, 1.0, 3.0, Reason.starved, (3.0, Reason.starved)),
    ],
)
def test_a_measured_factor_makes_no_training_slower_than_those_that_share_its_reading(
    monkeypatch, most, before, wanted, reason, expected
):
    monkeypatch.setattr(LoaderSharing, "most_factor", property(lambda self: most))
    loader = EchoLoader(DataLoader(range(8), batch_size=2), 1, share="sweep")
    decision = _within_surplus(Decision(wanted, reason, "said"), before, loader)
    assert (decision.factor, decision.reason) == expected
    assert _within_surplus(Decision(3.0, Reason.starved, "said"), 1.0, None).factor == 3
