"""What a training comes to, with a fake Trainer, loader and clock: times, counts and costs, joined over ranks and saved."""

import gc
import math
import sys
import weakref
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from meters import LateEvent, Loader, Run, saved
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from lightning_echo import EchoLoader, StagedDataset
from lightning_echo.cache.node_cache import CacheCounts
from lightning_echo.data.machine import OtherRuns
from lightning_echo.measure.control import PipelineCosts
from lightning_echo.measure.timing import DeviceEvents, StepTimer
from lightning_echo.training.counts import Examples, RunCounts
from lightning_echo.training.loaders import EchoLoaders
from lightning_echo.training.meters import RunMeter, events_of


def test_an_epoch_s_steps_are_all_but_the_wait_for_the_first_batch():
    measures = Run().epoch(8)
    assert measures.first_batch_seconds == 0.25
    assert measures.whole.steps == 8
    assert measures.whole.idle_fraction == pytest.approx(7 * 0.25 / (8 - 0.25))
    assert measures.whole == measures.judged


def idles(run, epochs=3, steps=1, **options):
    """Idle fractions and first waits of epochs in a row: of the wait of 9 s and the work of 1 s that each step has."""
    measured = [run.epoch(steps, wait=9.0, work=1.0, **options) for _ in range(epochs)]
    return [each.whole.idle_fraction for each in measured], [each.first_batch_seconds for each in measured]


def test_what_happens_between_epochs_is_no_part_of_them():
    run = Run(Loader())
    run.epoch(2)
    run.now += 1000.0
    run.meter.begin_epoch(run.loader)
    run.now += 1000.0
    run.step(wait=9.0, work=1.0)
    whole = run.meter.end_epoch(run.loader).whole
    assert (whole.wait_seconds, whole.busy_seconds) == (9.0, 1.0)


ONCE, NEVER, EACH = ([0.0, 0.9, 0.9], [9.0, None, None]), ([0.9] * 3, [None] * 3), ([0.0] * 3, [9.0] * 3)


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: Run(Loader()), ONCE),  # workers live on
        (lambda: Run(Loader(workers=0)), ONCE),  # nothing starts, but the first batch of all may open files
        (lambda: Run(workers=0), ONCE),
        (lambda: Run(workers=2), EACH),  # a plain loader with workers begins anew in each epoch,
        (lambda: Run(), EACH),  # and one that does not say how many it has may have some
    ],
)
def test_where_workers_start_the_first_batch_is_taken_out(make, expected):
    assert idles(make()) == expected


@pytest.mark.parametrize(("workers", "expected"), [(2, ONCE), (0, NEVER)])
def test_where_workers_have_ended_the_first_batch_is_taken_out_again(workers, expected):
    run = Run(Loader(workers=workers))
    run.epoch(2)
    run.loader.is_running = False  # somebody has closed it
    assert idles(run) == expected
    run.loader = Loader(workers=workers)  # a reload has made another one
    assert idles(run) == expected


def test_beside_a_plain_loader_with_workers_the_first_batch_is_taken_out_in_each_epoch():
    loaders = Together({"a": Loader()}, not_echoed=("b",))
    for workers, expected in ((2, EACH), (0, ONCE)):
        run = Run(loaders)
        run.meter.stop()
        run.trainer.train_dataloader = {"a": loaders["a"], "b": SimpleNamespace(num_workers=workers)}
        run.meter.start(run.trainer, run.module, loaders)
        assert idles(run) == expected


def test_where_workers_start_on_one_rank_the_first_batch_is_taken_out_on_all():
    nothing = (float("nan"),) * 7
    run = Run(Loader(), others=[nothing, nothing])
    run.epoch(2)
    run.others_start = True
    assert idles(run) == EACH
    run.others_start = False
    assert idles(run) == NEVER


def test_a_run_that_was_resumed_has_a_first_batch_of_its_own(tmp_path):
    run = Run(Loader())
    run.epoch(2)
    assert idles(Run(Loader(), state=saved(run, tmp_path))) == ONCE


@pytest.mark.parametrize("loader", [None, Loader()])
def test_where_nothing_of_the_fetching_is_seen_there_are_counts_alone(loader):
    measures = Run(loader, hears=False).epoch(8)
    assert (measures.whole, measures.judged, measures.costs, measures.first_batch_seconds) == (None, None, None, None)
    assert measures.fresh + measures.echoed == 64


def test_an_epoch_s_end_waits_for_what_a_device_has_not_passed_yet():
    run = Run()
    run.meter.timer = StepTimer(DeviceEvents(LateEvent), clock=lambda: run.now)
    run.meter.stop()
    run.meter.start(run.trainer, run.module, None)
    LateEvent.passed = False
    assert run.epoch(8).whole.steps == 8


def test_an_epoch_without_steps_comes_to_nothing():
    run = Run(Loader())
    measures = run.epoch(0)
    assert (measures.whole, measures.judged, measures.costs, measures.fresh) == (None, None, None, 0)
    assert run.epoch(8).whole.steps == 8


@pytest.mark.parametrize(("settled_at", "judged"), [(0, 8 - 2), (5, 3 + 0), (2, 6), (4, 4), (99, 0)])
def test_only_steps_planned_with_the_factor_in_force_and_from_running_workers_are_judged(settled_at, judged):
    """Of batches 0 to 7 those from ``settled_at`` on; the first two are the workers' first ones."""
    measures = Run(Loader(workers=2, settled_at=settled_at)).epoch(8)
    assert measures.whole.steps == 8
    assert (measures.judged.steps if measures.judged else None) == (judged or None)


def test_fresh_and_echoed_are_the_loader_s_in_the_epoch_and_in_the_run():
    run = Run(Loader())
    assert [(measures.fresh, measures.echoed) for measures in (run.epoch(3, fresh=2), run.epoch(5, fresh=8))] == [
        (6, 18),
        (40, 0),
    ]
    assert run.meter.counts.totals == (46, 18)


class Sharing(Loader):
    """A loader with a cache that another rank uses, too."""

    def __init__(self):
        super().__init__()
        self.cache_counts = CacheCounts(5, 500, 0, 0, False, "loaded", 2**20)

    def look_up(self, hits, misses):
        counts = self.cache_counts
        self.cache_counts = replace(counts, hits=counts.hits + hits, misses=counts.misses + misses)

    def deliver(self, fresh, stages, in_flight=0.0):
        super().deliver(fresh, stages, in_flight)
        self.look_up(0, fresh)


def test_what_another_rank_delivers_as_soon_as_an_epoch_has_begun_belongs_to_the_epoch():
    """The ranks leave the exchange at the beginning of an epoch one after the other."""
    run = Run(Sharing())
    gather = run.module.all_gather

    def all_gather(values):
        gathered = gather(values)
        run.loader.look_up(2, 2)
        return gathered

    run.module.all_gather = all_gather
    run.meter.begin_epoch(run.loader)
    run.module.all_gather = gather
    run.step(fresh=4)
    assert run.meter.end_epoch(run.loader).caches[""].hit_fraction == 2 / 8


def test_costs_are_those_of_a_batch_were_all_its_examples_fresh():
    """4 of 8 examples are fresh and take 0.4 s: 0.8 s a batch. What workers spent before all of them ran does not count."""
    loader = Loader(workers=2)
    run = Run(loader)
    run.meter.begin_epoch(loader)
    for _ in range(2):
        run.step(stages=(50.0, 50.0, 50.0))
    for _ in range(6):
        run.step()
    measures = run.meter.end_epoch(loader)
    expected = PipelineCosts("after_augmentation", 0.8, 0.2, 0.1, measures.judged.busy_seconds, 2)
    assert vars(measures.costs) == pytest.approx(vars(expected))
    assert measures.judged.busy_seconds == pytest.approx(0.75)


def test_a_plain_loader_costs_what_its_waiting_says():
    measures = Run().epoch(8, wait=0.5, work=0.5)
    step = (0.5 * 8 + 0.5 * 7) / 8
    assert measures.costs.host_seconds(1) == pytest.approx(step)
    assert measures.costs.device_seconds == pytest.approx(0.5)
    assert measures.costs.step_seconds(2) == pytest.approx(0.5)


def test_a_plain_loader_without_workers_takes_turns_with_the_steps():
    costs = Run(workers=0).epoch(8, wait=0.5, work=0.5).costs
    waited = 0.5 * 7 / 8
    assert costs.workers == 0
    assert costs.step_seconds(1) == pytest.approx(0.5 + waited)
    assert costs.step_seconds(2) == pytest.approx(0.5 + waited / 2)
    assert Run(workers=4).epoch(8).costs.workers == 1


def test_an_echo_loader_that_cannot_be_looked_into_costs_what_its_waiting_says():
    loader = Loader(factor=2.0)
    costs = Run(loader).epoch(8, wait=0.5, work=0.5, stages=(0.0, 0.0, 0.0)).costs
    assert costs.insertion_point == "after_batching"
    assert costs.host_seconds(2) == pytest.approx(1.0)


def test_reads_in_flight_are_those_of_all_workers_in_the_epoch_and_the_mean_over_the_ranks():
    """Each of two workers has 10 reads under way, then 30; what it had before all workers ran does not count."""
    run = Run(Loader(workers=2))
    assert run.epoch(8, in_flight=7.0).reads_in_flight is None, "no threads read ahead"
    run = Run(Loader(workers=2))
    run.loader.reads_ahead = True
    run.meter.begin_epoch(run.loader)
    for in_flight in (500.0, 500.0, 5.0, 15.0, 10.0):
        run.step(in_flight=in_flight)
    assert run.meter.end_epoch(run.loader).reads_in_flight == pytest.approx(20)
    assert run.epoch(4, in_flight=30.0).reads_in_flight == pytest.approx(60)
    nan = float("nan")
    for other, mean in ((40.0, 30), (nan, 10)):  # the second reads nothing ahead
        of_ranks = Run(Loader(workers=2), others=[(1.0, 1.0, 1.0, other, nan, nan, nan)])
        of_ranks.loader.reads_ahead = True
        assert of_ranks.epoch(4, in_flight=10.0).reads_in_flight == pytest.approx(mean)


def test_the_waiting_of_workers_is_the_mean_over_the_ranks_that_know_it():
    nan = float("nan")
    for other, mean in ((0.5, 0.7), (nan, 0.9)):
        run = Run(Loader(), others=[(nan, nan, nan, nan, other, nan, nan)])
        run.meter.begin_epoch(run.loader)
        run.step()
        run.meter._waits.fraction = 0.9
        assert run.meter.end_epoch(run.loader).worker_wait_fraction == pytest.approx(mean)
    assert Run(Loader()).epoch(40).worker_wait_fraction is None, "it is no DataLoader"


@pytest.mark.parametrize(("others", "keeps_up"), [((), True), ((0.5,), True), ((0.5, 0.05), False), ((math.nan,), False)])
def test_a_plain_loader_keeps_up_if_workers_of_all_ranks_have_nothing_to_do(others, keeps_up):
    """A step of 1 s waits for a quarter. Workers that have nothing to do for half of the time need half a second for a batch."""
    run = Run(workers=2, others=[(math.nan,) * 4 + (other, math.nan) for other in others])
    idle = SimpleNamespace(fraction=0.9, no_request=0.5, begin_epoch=lambda: None, end_step=lambda: None)
    run.meter._waits = idle
    costs = run.epoch(20).costs
    assert costs.keeps_up is keeps_up
    host = 1.0 - (0.5 if keeps_up else min(0.0 if math.isnan(other) else other for other in others))
    assert costs.host_seconds(1) == pytest.approx(host, rel=0.02)


def test_reads_in_flight_of_several_loaders_add_up():
    loaders = Together({"a": Loader(workers=2), "b": Loader(workers=2), "c": Loader(workers=2)})
    loaders["a"].reads_ahead = loaders["b"].reads_ahead = True
    assert Run(loaders).epoch(4, in_flight=3.0).reads_in_flight == pytest.approx(12)


@pytest.mark.parametrize(("others", "longest"), [([9.0, 0.1], 9.0), ([0.1, float("nan")], 0.25)])
def test_the_wait_for_the_first_batch_is_that_of_the_rank_that_waited_longest(others, longest):
    nan = float("nan")
    assert Run(others=[(nan, nan, nan, nan, nan, first) for first in others]).epoch(8).first_batch_seconds == pytest.approx(
        longest
    )


def test_a_run_resumed_in_the_middle_of_an_epoch_comes_to_the_same(tmp_path):
    """The loader that resumes has in its own state what it has delivered."""
    whole = Run(Loader())
    whole.epoch(8)
    expected = whole.epoch(8)
    run = Run(Loader())
    run.epoch(8)
    run.meter.begin_epoch(run.loader)
    for _ in range(3):
        run.step()
    resumed = Run(run.loader, state=saved(run, tmp_path))
    assert resumed.meter.is_in_epoch
    for _ in range(5):
        resumed.step()
    measures = resumed.meter.end_epoch(resumed.loader)
    assert (measures.fresh, measures.echoed) == (expected.fresh, expected.echoed)
    assert measures.whole.steps == 8
    assert resumed.meter.counts.totals == whole.meter.counts.totals
    assert not resumed.meter.is_in_epoch


def test_a_checkpoint_s_totals_count_once_in_the_job(tmp_path):
    """Rank 0 saves what all ranks have; each of them loads it."""
    nothing = (float("nan"),) * 5
    state = saved(Run(), tmp_path)
    state["counts"] = [80, 16]
    ranks = [Run(others=[nothing], rank=rank, state=state) for rank in (0, 1)]
    assert [rank.meter.counts.counter.counts.tolist() for rank in ranks] == [[80, 16], [0, 0]]
    for rank in ranks:
        rank.step()
        rank.meter.count(None)
    assert [rank.meter.counts.counter.counts.tolist() for rank in ranks] == [[88, 16], [8, 0]]


class Together(EchoLoaders):
    """Fake loaders of which each step takes a batch."""

    def deliver(self, fresh, stages, in_flight=0.0):
        for loader in self.values():
            loader.deliver(fresh, stages, in_flight)


def test_counts_of_each_loader_survive_being_saved_again_right_after_a_resume(tmp_path):
    loader = Together({"a": Loader(), "b": Loader()})
    run = Run(loader, others=[(float("nan"),) * 11])
    run.step()
    run.meter.count(loader)
    state = saved(run, tmp_path)
    assert state["parts"] == {"a": [4, 4], "b": [4, 4]}  # gathered by a fake: those of this rank
    again = Run(loader, others=[(float("nan"),) * 11], state=state)
    assert saved(again, tmp_path)["parts"] == state["parts"]
    again.step()
    assert saved(again, tmp_path)["parts"] == {"a": [4 + 2 * 4] * 2, "b": [4 + 2 * 4] * 2}


@pytest.mark.parametrize(("of_job", "corrected"), [((20, 12), True), ((20, 11), False)])
@pytest.mark.parametrize("counts_job", [True, False])
def test_loaded_totals_become_those_of_all_ranks_if_they_are_of_as_many_examples(of_job, corrected, counts_job):
    counts = RunCounts()
    counts.load([26, 6])  # rank 0 had as many fresh examples as two of 13
    if not counts_job:  # as on the other ranks: their metric adds to that of rank 0
        counts.counter.reset()
    counts.correct(Examples(*of_job), counts_job=counts_job)
    counts.go_on_from(Examples(13, 3))
    expected = of_job if corrected else (26, 6)
    assert counts.state(2, Examples()) == [*expected]
    if counts_job:
        assert counts.add_up() == expected


@pytest.mark.parametrize("resumes", [False, True])
def test_of_each_loader_the_examples_of_the_epoch_are_measured_also_after_a_resume_within_it(tmp_path, resumes):
    loader = Together({"a": Loader(), "b": Loader()})
    run = Run(loader)
    assert run.epoch(4, fresh=2).parts == {"a": (8, 24), "b": (8, 24)}
    run.meter.begin_epoch(loader)
    run.step(fresh=6)
    run.meter.count(loader)
    if resumes:
        run = Run(loader, state=saved(run, tmp_path))
    run.step(fresh=5)
    assert run.meter.end_epoch(loader).parts == {"a": (11, 5), "b": (11, 5)}
    assert run.epoch(1, fresh=8).parts == {"a": (8, 0), "b": (8, 0)}


def test_the_examples_of_this_rank_are_counted_from_the_start_of_the_epoch():
    run = Run(Loader())
    run.epoch(4, fresh=2)
    run.meter.begin_epoch(run.loader)
    assert run.meter.own_in_epoch(run.loader).uses == 1, "nothing yet"
    run.step(fresh=2)
    assert run.meter.own_in_epoch(run.loader) == (2, 6)
    assert run.meter.own_in_epoch(run.loader).uses == 4


@pytest.mark.parametrize(("workers", "found"), [((0, 0), 0), ((1, 3), 1), ((0, 2), None)])
def test_plain_loaders_of_a_collection_take_turns_only_if_none_has_workers(workers, found):
    run = Run()
    run.meter.stop()
    run.trainer.train_dataloader = {"a": SimpleNamespace(num_workers=workers[0]), "b": [SimpleNamespace(num_workers=workers[1])]}
    run.meter.start(run.trainer, run.module, None)
    costs = run.epoch(8, wait=0.5, work=0.5).costs
    assert (None if costs is None else costs.workers) == found


@pytest.mark.parametrize(("nodes", "expected"), [([0, 0, 1], [0, 0, 1]), ([0, 1, 0, 1], [0, 1, 0, 1]), ([0, 0], [None, None])])
def test_a_rank_is_on_the_node_that_its_trainer_says_and_of_one_node_there_is_nothing_to_name(nodes, expected):
    run = Run(Loader())
    run.meter.stop()
    of_ranks = torch.tensor(nodes)[:, None]
    run.module.all_gather = lambda values: of_ranks if values.dtype == torch.int64 else values
    run.meter.start(run.trainer, run.module, None)
    assert [run.meter.node_of(rank) for rank in range(len(nodes))] == expected


def test_the_events_of_a_device_outlive_each_training_and_are_those_of_one_device(monkeypatch):
    class Event:
        def __init__(self, enable_timing):
            self.has_timing = enable_timing

    monkeypatch.setattr("torch.cuda.Event", Event)
    monkeypatch.setattr("lightning_echo.training.meters._EVENTS", {})
    event = events_of(torch.device("cuda", 0)).take()  # by a training that is over, and gave nothing back
    assert event.has_timing
    alive = weakref.ref(event)
    del event
    gc.collect()
    assert alive() is not None
    events_of(torch.device("cuda", 0)).give_back(alive())
    assert events_of(torch.device("cuda", 1)).take() is not alive()
    assert events_of(torch.device("cuda", 0)).take() is alive()


@pytest.mark.parametrize(
    ("watched", "workers", "batch_size"),
    [
        (DataLoader(range(64), 8, num_workers=3), 3, 8),
        (DataLoader(range(64), sampler=DistributedSampler(range(64), 2, 0), batch_size=8, num_workers=3), 3, 0),
        (DataLoader(range(64), batch_sampler=BatchSampler(SequentialSampler(range(64)), 8, True), num_workers=3), 3, 0),
        (None, 0, 0),
    ],
)
def test_workers_whose_waiting_is_known_are_known_with_what_other_machines_could_read(watched, workers, batch_size, monkeypatch):
    meter = RunMeter()
    monkeypatch.setattr(meter, "_watched", watched)
    waiting = meter.waiting(0.25, None)
    assert (waiting.fraction, waiting.workers, waiting.batch_size, waiting.ranks) == (0.25, workers, batch_size, 1)


class Cut(StagedDataset):
    def __len__(self):
        return 64

    def load(self, index):
        return torch.zeros(1000)

    def augment(self, example):
        return example


class AtOnce(Cut):
    def __getitems__(self, indices):
        return torch.zeros(len(indices), 1000)


@pytest.mark.parametrize(
    ("dataset", "echoes", "free", "fraction"),
    [
        (range(64), False, 10**9, 0.0),  # nothing shows where it could be cut
        (AtOnce(), False, 10**9, 0.0),
        (Cut(), False, 10**9, None),  # what an example weighs is not known
        (Cut(), True, 10**9, 1.0),
        (Cut(), True, 256_000, 0.5),  # 64 examples of 4,000 bytes in half of it
        (Cut(), True, None, None),
    ],
)
def test_what_a_cache_would_hold_is_known_of_a_loader_that_echoes_and_nothing_of_data_that_cannot_be_cut(
    dataset, echoes, free, fraction, monkeypatch
):
    monkeypatch.setattr("lightning_echo.training.waits.free_memory_bytes", lambda: free)
    meter, plain = RunMeter(), DataLoader(dataset, 8, num_workers=3)
    monkeypatch.setattr(meter, "_watched", plain)
    loader = EchoLoader(plain, 2, seed=0) if echoes else None
    assert meter.waiting(None, loader).cached_fraction == (None if fraction is None else pytest.approx(fraction, rel=0.05))


@pytest.mark.parametrize("is_initialized", [True, False])
def test_a_cluster_is_known_only_where_this_program_is_connected_to_one(is_initialized, monkeypatch):
    meter = RunMeter()
    monkeypatch.setattr(meter, "_watched", DataLoader(range(64), 8, num_workers=3))
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(is_initialized=lambda: is_initialized))
    assert meter.waiting(0.0, None).has_cluster is is_initialized
    monkeypatch.delitem(sys.modules, "ray")
    assert not meter.waiting(0.0, None).has_cluster


def test_a_module_of_the_name_ray_that_is_another_one_ends_no_training(monkeypatch):
    meter = RunMeter()
    monkeypatch.setattr(meter, "_watched", DataLoader(range(64), 8, num_workers=3))
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace())
    assert not meter.waiting(0.0, None).has_cluster


class Alike:
    """Another run of the program, and the calls that asked for it."""

    def __init__(self):
        self.asked = []

    def __call__(self, ranks):
        self.asked.append(list(ranks))
        return OtherRuns("train.py", len(self.asked))


@pytest.mark.parametrize(
    ("changes", "loader", "is_asked"),
    [
        ({}, DataLoader(range(64), 8, num_workers=3), True),
        ({"_is_rank_zero": False}, DataLoader(range(64), 8, num_workers=3), False),
        ({"nodes": [0, 0, 1, 1]}, DataLoader(range(64), 8, num_workers=3), False),
        ({}, DataLoader(AtOnce(), 8, num_workers=3), False),  # whether its calls may be cut would have to be tried
        (
            {},
            DataLoader(range(64), 8, sampler=DistributedSampler(range(64), 2, 0), num_workers=3),
            False,
        ),  # the user divides the data
        ({"world_size": 2}, DataLoader(range(64), 8, sampler=DistributedSampler(range(64), 2, 0), num_workers=3), True),
        ({}, DataLoader(range(64), num_workers=3, batch_sampler=BatchSampler(SequentialSampler(range(64)), 8, False)), False),
        ({}, DataLoader(range(64), None, num_workers=3), False),
    ],
)
def test_other_runs_are_looked_for_once_by_the_rank_that_gives_advice_where_the_loader_can_share(
    changes, loader, is_asked, monkeypatch
):
    alike, meter = Alike(), RunMeter()
    monkeypatch.setattr("lightning_echo.training.meters.other_runs", alike)
    for name, value in {"_watched": loader, "_is_rank_zero": True, "_own_pids": [7, 8], **changes}.items():
        monkeypatch.setattr(meter, name, value)
    found = [(waiting.program, waiting.other_runs) for waiting in (meter.waiting(0.0, None), meter.waiting(0.0, None))]
    assert found == [("train.py", 1) if is_asked else ("", 0)] * 2, "they end while the advice is read"
    assert alike.asked == ([[7, 8]] if is_asked else [])
