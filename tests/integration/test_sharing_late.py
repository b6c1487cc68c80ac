"""A training that joins within a pass: it gets the whole pass if it has missed at most ``late`` of it."""

import os
import re
import signal
from collections import Counter
from contextlib import suppress
from itertools import islice
from pathlib import Path

import pytest
import torch
from sharing_runs import (
    closing,
    epochs_of,
    examples,
    indices,
    kill_reader,
    loader_of,
    places,
    rows,
    status,
    together,
    wait_until,
)
from soak import children_of
from torch.utils.data import Subset

from lightning_echo import EchoLoader, StagedDataset
from lightning_echo.share.config import log_of

pytestmark = pytest.mark.usefixtures("own_folder")

LENGTH, BATCH_SIZE, TAKEN = 2000, 8, 10  # taken: batches of the first training before the other one comes
SMALL, MEDIUM, LARGE = 2**13, 2**17, 2**23  # bytes: windows for some 20 examples, for a quarter of a pass, and for several passes


class Noted(StagedDataset):
    """Example ``i`` is its index, noise, and bytes that follow from the index. What a reader reads is noted, with the noise."""

    def __init__(self, path):
        self.path, self.maker = str(path), os.getpid()

    def __len__(self):
        return LENGTH

    def read(self, index):
        return index

    def decode(self, raw):
        return raw

    def augment(self, index):
        noise = torch.rand(())
        if self.maker not in (os.getpid(), os.getppid()):  # not what the training looks at before
            with open(f"{self.path}/reads", "a") as file:
                file.write(f"{index} {noise.item()!r}\n")
        return {"index": index, "noise": noise, "data": torch.full((64,), index % 251, dtype=torch.uint8)}


def reads(folder, items):
    """How often each of these items was read: index and noise tell an item from another one."""
    counted = Counter((folder / "reads").read_text().splitlines())
    return [counted[f"{index} {noise!r}"] for index, noise in items]


def begun(dataset, batches=TAKEN, **share):
    """A training that has had so many batches, and takes no more; its iterator, and what it has had."""
    loader = loader_of(dataset, BATCH_SIZE, **{"window": SMALL, "linger_seconds": 5, **share})
    iterator = iter(loader)
    return loader, iterator, [rows(next(iterator)) for _ in range(batches)]


def rest(loader, iterator, had, count):
    """Returns the rest of ``count`` epochs of a training that has begun. It goes on as soon as another one is there."""

    def run():
        wait_until(lambda: len(places()) == 2, "another training is there")
        epochs = [had + [rows(batch) for batch in iterator]]
        epochs += epochs_of(loader, count - 1)
        loader.close()
        return epochs

    return run


@pytest.mark.slow
@pytest.mark.grid
@pytest.mark.parametrize("cache", [None, "8MiB"])
@pytest.mark.parametrize("window", [SMALL, LARGE])
def test_it_gets_the_whole_pass_in_the_same_order_and_what_is_read_again_is_counted(window, cache, tmp_path, caplog):
    caplog.set_level("INFO", logger="lightning_echo")
    options = {"options": {"cache": cache}, "window": window}
    first = begun(Noted(tmp_path), **options)
    second = loader_of(Noted(tmp_path), BATCH_SIZE, **options)
    late, early = together(closing(second, 2), rest(*first, 2))
    assert [examples(epoch) for epoch in late] == [examples(epoch) for epoch in early]
    assert [sorted(indices(epoch)) for epoch in late] == [list(range(LENGTH))] * 2
    again = second.sharing.read_again_examples
    counted = reads(tmp_path, [example for epoch in early for example in examples(epoch)])
    assert set(counted) <= {1, 2}
    assert again == (0 if cache else counted.count(2)), "a cache has them all"
    if window == SMALL:
        assert TAKEN * BATCH_SIZE / 2 <= counted.count(2) <= LENGTH / 10
        (said,) = [one.getMessage() for one in caplog.records if "comes late, and misses nothing" in one.getMessage()]
        count = int(re.search(r"it gets (\d+) examples first", said)[1])
        assert cache or count == again
        before, after = Path(log_of("data")).read_text().split(" comes late: ")
        assert after.startswith(f"items 0 to {count - 1} are read again for it, with 1 workers")
        assert "number of workers" not in before, "none is started that ends at once, since one reads again"
    else:
        assert counted.count(2) == 0
        assert "comes late" not in caplog.text
    assert (second.sharing.missed_examples, first[0].sharing.read_again_examples) == (0, 0)


@pytest.mark.slow
@pytest.mark.parametrize(("late", "batches"), [(0, TAKEN), (0.1, 30)])
def test_later_than_that_it_begins_where_the_others_are_and_says_so(late, batches, tmp_path, caplog):
    caplog.set_level("INFO", logger="lightning_echo")
    first = begun(Noted(tmp_path), batches)
    second = loader_of(Noted(tmp_path), BATCH_SIZE, late=late)
    found, early = together(closing(second, 2), rest(*first, 3))
    stream = [example for epoch in early for example in examples(epoch)]
    begins = stream.index(examples(found[0])[0])
    of_first_pass = len(set(examples(found[0])) & set(examples(early[begins // LENGTH])))
    (said,) = re.findall(r"mid-pass; this run sees (\d+)% of the current pass", caplog.text)
    assert int(said) == round(100 * of_first_pass / LENGTH) < 100
    assert begins >= batches * BATCH_SIZE
    assert [example for epoch in found for example in examples(epoch)] == stream[begins : begins + 2 * LENGTH]
    assert set(reads(tmp_path, stream)) == {1}


@pytest.mark.slow
@pytest.mark.parametrize("window", [SMALL, LARGE])
def test_on_a_part_it_gets_all_of_its_part_and_nothing_else(window, tmp_path):
    part = range(500, 1300)
    first = begun(Noted(tmp_path), window=window)
    second = loader_of(Subset(Noted(tmp_path), part), BATCH_SIZE, window=window)
    late, early = together(closing(second, 2), rest(*first, 2))
    assert [sorted(indices(epoch)) for epoch in late] == [list(part)] * 2
    assert [examples(epoch) for epoch in late] == [[one for one in examples(epoch) if one[0] in part] for epoch in early]


@pytest.mark.slow
def test_what_only_it_wants_is_read_again_also_if_the_window_holds_the_others(tmp_path):
    """The first training takes one part, so that nothing of the other part was read."""
    first = begun(Subset(Noted(tmp_path), range(1000)), window=MEDIUM, batches=4)
    second = loader_of(Subset(Noted(tmp_path), range(900, LENGTH)), BATCH_SIZE, window=MEDIUM, late=1.0)
    late, early = together(closing(second, 2), rest(*first, 2))
    assert [sorted(indices(epoch)) for epoch in late] == [list(range(900, LENGTH))] * 2
    assert [sorted(indices(epoch)) for epoch in early] == [list(range(1000))] * 2
    for epochs in (late, early):
        assert set(reads(tmp_path, [example for epoch in epochs for example in examples(epoch)])) <= {1, 2}
    assert 0 < second.sharing.read_again_examples <= LENGTH


@pytest.mark.slow
def test_if_the_reader_is_passes_ahead_with_another_part_no_passes_are_read_again(tmp_path, caplog):
    """``late`` is a bound of what is read again, too: with small examples a window has many passes."""
    caplog.set_level("INFO", logger="lightning_echo")
    first = begun(Subset(Noted(tmp_path), range(1000)), window=LARGE, batches=4)
    wait_until(lambda: status()["written"] > 2 * LENGTH, "the reader is ahead")
    second = loader_of(Subset(Noted(tmp_path), range(900, LENGTH)), BATCH_SIZE, window=LARGE, late=1.0)
    late, early = together(closing(second, 1), rest(*first, 6))
    assert second.sharing.read_again_examples == 0
    assert "of the current pass" in caplog.text
    assert len(late[0]) == -(-(LENGTH - 900) // BATCH_SIZE)
    assert set(indices(late[0])) <= set(range(900, LENGTH))
    assert [sorted(indices(epoch)) for epoch in early] == [list(range(1000))] * 6


@pytest.mark.slow
@pytest.mark.parametrize("factor", [2, "demand"])
def test_echoing_it_has_each_example_fresh_once_a_pass_and_none_twice_in_a_batch(factor, tmp_path):
    first = begun(Noted(tmp_path))
    second = loader_of(Noted(tmp_path), BATCH_SIZE, factor=factor)
    found, early = together(closing(second, 1), rest(*first, 1))
    for batch in found[0]:
        assert len({index for index, _ in batch}) == len(batch)
    distinct = {example for batch in found[0] for example in batch}
    assert second.counts.fresh == len(distinct)
    assert distinct == set(examples(early[0])[: len(distinct)])


@pytest.mark.slow
@pytest.mark.parametrize("who", ["reader", "worker"])
def test_the_reader_or_a_worker_is_killed_while_it_catches_up_and_nobody_loses_anything(who, tmp_path):
    first = begun(Noted(tmp_path))
    second = loader_of(Noted(tmp_path), BATCH_SIZE)
    iterator = iter(second)
    had = [rows(next(iterator))]
    assert min(places()) < TAKEN * BATCH_SIZE, "it catches up"
    if who == "reader":
        kill_reader()
    else:
        reader = status()["pid"]
        with open(f"/proc/{reader}/task/{reader}/children") as file:
            os.kill(int(file.read().split()[-1]), signal.SIGKILL)  # the last one was started for the second training
    late, early = together(rest(second, iterator, had, 2), rest(*first, 2))
    assert [examples(epoch) for epoch in late] == [examples(epoch) for epoch in early]
    assert [sorted(indices(epoch)) for epoch in late] == [list(range(LENGTH))] * 2


@pytest.mark.slow
def test_it_leaves_while_it_catches_up_and_the_next_one_comes_late_too(tmp_path):
    first = begun(Noted(tmp_path))
    second = loader_of(Noted(tmp_path), BATCH_SIZE)
    had = rows(next(iter(second)))
    second.close()
    wait_until(lambda: status()["count"] == 1, "it has left")
    third = loader_of(Noted(tmp_path), BATCH_SIZE)
    late, early = together(closing(third, 2), rest(*first, 2))
    assert [examples(epoch) for epoch in late] == [examples(epoch) for epoch in early]
    assert examples([had]) == examples(early[0])[:BATCH_SIZE]


class Heavy(Noted):
    """Examples of 4 KiB."""

    def augment(self, index):
        return {**super().augment(index), "heavy": torch.ones(4096, dtype=torch.uint8)}


def windows_of(pid):
    """The bytes of memory that the windows take of which a process has a descriptor, by inode."""
    found = {}
    with suppress(FileNotFoundError):  # it has ended meanwhile
        for descriptor in os.listdir(f"/proc/{pid}/fd"):
            with suppress(FileNotFoundError):
                path = f"/proc/{pid}/fd/{descriptor}"
                if "lightning_echo-window" in os.readlink(path):
                    found[os.stat(path).st_ino] = os.stat(path).st_blocks * 512
    return found


@pytest.mark.slow
def test_when_a_training_has_caught_up_the_memory_for_that_is_free_also_if_a_worker_was_forked_meanwhile(tmp_path):
    options = {"window": MEDIUM, "late": 1.0}
    first, of_first, early = begun(Heavy(tmp_path), **options)
    reader = status()["pid"]
    (main,) = windows_of(reader)
    second = loader_of(Heavy(tmp_path), BATCH_SIZE, **options)
    iterator = iter(second)
    had = [rows(next(iterator))]
    (again,) = set(windows_of(reader)) - {main}
    third, over = loader_of(Heavy(tmp_path), BATCH_SIZE, window=MEDIUM, late=0), []

    def held():
        return [held[again] for pid in children_of(reader) if again in (held := windows_of(pid))]

    def catches_up():
        wait_until(lambda: len(held()) > 1, "a worker was forked for the third training")
        assert max(held()) > 2**16, "what is read again takes memory"
        had.extend(rows(batch) for batch in islice(iterator, TAKEN + 2))
        wait_until(lambda: max(held()) < 2**16, "it is free, although the worker has it")
        over.append(True)
        second.close()

    def goes_on():  # else the second one may wait for it: the lanes are smaller with the third one's worker
        while not over:
            next(of_first)
        first.close()

    together(catches_up, goes_on, closing(third, 1))
    assert examples(had)[: TAKEN * BATCH_SIZE] == examples(early)


ALL, FOLD = range(LENGTH), range(500, 1300)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("part", "factor", "batches"),
    [*((ALL, factor, batches) for factor in (1, 1.5, "demand") for batches in (1, 5, 12)), (FOLD, 1, 5), (FOLD, 1.5, 5)],
    ids=str,
)
def test_a_run_that_is_resumed_beside_another_one_continues_where_it_stopped(part, factor, batches, tmp_path):
    """Within what was read again for it, and after that. The other training does not go on meanwhile, or a little."""

    def make():
        dataset = Noted(tmp_path)
        return loader_of(dataset if part is ALL else Subset(dataset, part), BATCH_SIZE, factor=factor)

    first = begun(Noted(tmp_path), batches=20)
    second = make()
    iterator = iter(second)
    had = [rows(next(iterator)) for _ in range(batches)]
    state = second.state_dict()
    second.close()
    wait_until(lambda: status()["count"] == 1, "it has left")
    third = make()
    third.load_state_dict(state)
    found, early = together(closing(third, 1), rest(*first, 1))
    stream = [example for example in examples(early[0]) if example[0] in part]
    both = [example for batch in [*had, *found[0]] for example in batch]
    if factor == 1:
        assert both == stream
    assert third.counts.fresh == len(set(both))
    assert set(both) == set(stream[: len(set(both))]), "in order, without a gap"


class Together(Noted):
    """Reads many examples in one call."""

    def __getitems__(self, wanted):
        return [self[index] for index in wanted]


@pytest.mark.parametrize("passes", [0, 1])
def test_data_that_reads_many_examples_in_one_call_gives_the_same_ones_again(passes, tmp_path):
    """The second pass begins in the middle of a chunk."""
    loader, iterator, had = begun(Together(tmp_path), TAKEN if not passes else LENGTH // BATCH_SIZE)
    if passes:
        assert next(iterator, None) is None
        iterator = iter(loader)
        had = [rows(next(iterator)) for _ in range(TAKEN)]
    second = loader_of(Together(tmp_path), BATCH_SIZE)
    late, early = together(closing(second, 1), rest(loader, iterator, had, 1))
    assert examples(late[0]) == examples(early[0])
    assert sorted(indices(late[0])) == list(range(LENGTH))


@pytest.mark.slow
def test_a_sampler_of_ones_own_is_not_asked_again(tmp_path, caplog):
    caplog.set_level("INFO", logger="lightning_echo")

    class Sampler(torch.utils.data.Sampler):
        def __iter__(self):
            return iter(torch.randperm(LENGTH).tolist())

        def __len__(self):
            return LENGTH

    def make():
        plain = torch.utils.data.DataLoader(Noted(tmp_path), BATCH_SIZE, sampler=Sampler(), num_workers=1)
        return EchoLoader(plain, 1, share={"name": "data", "window": SMALL, "linger_seconds": 5}, seed=0)

    first = make()
    iterator = iter(first)
    had = [rows(next(iterator)) for _ in range(TAKEN)]
    _, early = together(closing(make(), 1), rest(first, iterator, had, 2))
    assert "mid-pass; this run sees" in caplog.text
    assert [sorted(indices(epoch)) for epoch in early] == [list(range(LENGTH))] * 2
