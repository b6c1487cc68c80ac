"""What a loader stands on: worked out from its source, its point and the ranks, and from nothing else."""

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from lightning_echo import StagedDataset
from lightning_echo.cache.kept import CacheConfig
from lightning_echo.insertion import InsertionPoint
from lightning_echo.loader.setting import Setting
from lightning_echo.pipeline.kinds import Indexed
from lightning_echo.pipeline.pipelines import Launch, Start, rank_key

EXAMPLES, BATCHES = InsertionPoint.after_augmentation, InsertionPoint.after_batching


def setting(point=EXAMPLES, buffer_size=None, *, factor=2.0, ranks=None, **options):
    return Setting(DataLoader(range(22), batch_size=4, **options), point, buffer_size, factor, ranks)


@pytest.mark.parametrize(("ranks", "examples", "batches"), [(None, 22, 6), ((2, 0), 11, 3), ((3, 1), 8, 2)])
def test_a_pass_is_what_a_distributed_sampler_gives_a_rank(ranks, examples, batches):
    assert [setting(point, ranks=ranks).items_per_pass() for point in (EXAMPLES, BATCHES)] == [examples, batches]


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(8))


def test_a_cache_of_whole_examples_leaves_nothing_to_redo_so_that_auto_is_a_later_point():
    cut = StagedDataset.of(range(22), augment=lambda example: example + 1)

    def chosen(point, hold):
        return Setting(DataLoader(cut, 4), point, None, 1.0, None, cache=CacheConfig("1MiB", hold)).choice.point

    assert chosen(InsertionPoint.auto, "whole") is EXAMPLES
    assert chosen(InsertionPoint.auto, "auto") is InsertionPoint.before_augmentation
    with pytest.raises(ValueError, match=r"cache.hold='whole' does not fit the insertion point"):
        chosen(InsertionPoint.before_augmentation, "whole")


@pytest.mark.parametrize(
    ("make", "point", "said"),
    [
        (lambda: DataLoader(Stream(), 4), EXAMPLES, "cache is impossible here: the data set is a stream, which has no index"),
        (lambda: [torch.zeros(4)], BATCHES, "list does not tell which examples are in its batches.*map-style"),
    ],
)
def test_a_cache_over_a_stream_or_an_opaque_loader_is_refused_with_what_works_instead(make, point, said):
    with pytest.raises(ValueError, match=said):
        Setting(make(), point, 8, 1.0, None, cache=CacheConfig("1MiB"))


def start(of, factor=2.0):
    state = {"plan": None, "order": None}
    return of.start(Launch(seed=0, factor=factor, state=state, begin_at=Start(0, 0), worker_init_fn=None))


def fresh_in(pipeline, batches):
    """Returns the number of fresh examples in the first batches, and closes the pipeline."""
    reports = [pipeline.next_batch(delivered)[1] for delivered in range(batches)]
    pipeline.close()
    return sum(report.fresh for report in reports)


@pytest.fixture
def mesh(monkeypatch):
    """Rank 3 of a job of 2 data-parallel groups of 2: it is in the second one."""
    for name, answer in (("world", (4, 3)), ("data_parallel", (2, 1))):
        monkeypatch.setattr(f"lightning_echo.loader.setting.{name}", lambda answer=answer: answer)


def test_data_is_not_dealt_out_to_ranks_that_share_the_work_on_it(mesh):
    message = r"among 4 ranks, but the data-parallel dimension of .* mesh has 2.*EchoDataModule.*num_replicas=2, rank=1\)"
    for point in (EXAMPLES, BATCHES):
        with pytest.raises(RuntimeError, match=message):
            start(setting(point))


@pytest.mark.parametrize("ranks", [(2, 1), (1, 0), (4, 3)])
def test_ranks_that_share_the_work_on_the_same_data_draw_the_same_noise(mesh, ranks, monkeypatch):
    keys = []
    monkeypatch.setattr(Indexed, "open", lambda kind, opening: keys.append(opening.key))
    start(setting(ranks=ranks))
    assert keys == [rank_key(0, 1)]
    assert rank_key(0, 1) != rank_key(0, 3), "that of this process"


def test_a_stream_or_batches_of_which_nothing_is_known_are_not_dealt_out_and_not_refused(mesh):
    stream = Setting(DataLoader(Stream(), batch_size=4), EXAMPLES, None, 2.0, None)
    batches = Setting([1, 2, 3], BATCHES, None, 2.0, None)
    assert fresh_in(start(stream, 1.0), 2) == 8
    assert fresh_in(start(batches, 1.0), 3) == 3


def test_a_sampler_that_deals_out_by_itself_is_left_to_it(mesh):
    dealt_out = setting(sampler=DistributedSampler(range(22), num_replicas=2, rank=1))
    assert (dealt_out.layout().replicas, dealt_out.items_per_pass()) == (1, 11)
    assert fresh_in(start(dealt_out, 1.0), 3) == 11


def test_ranks_that_share_their_data_are_still_told_apart(monkeypatch):
    unsharded, made_before = setting(ranks=(1, 0)), setting()
    monkeypatch.setattr("lightning_echo.loader.setting.world", lambda: (2, 1))
    assert (made_before.layout().replicas, unsharded.layout().replicas) == (2, 1)
    assert unsharded.rank_of_process() == made_before.rank_of_process() == 1
    assert setting(ranks=(4, 3)).rank_of_process() == 1, "the job's rank, where there is a job"
    monkeypatch.undo()
    assert setting(ranks=(4, 3)).rank_of_process() == 3
