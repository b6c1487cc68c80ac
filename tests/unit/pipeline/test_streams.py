"""A worker that echoes a stream: exact counts, batches as planned, a clean end of each pass, and a state that brings all back."""

import copy
import pickle
import random
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from own_states import Ends, RollsOver
from torch.utils.data import IterableDataset, default_collate

from lightning_echo.pipeline.streams import StreamEcho, StreamRequest
from lightning_echo.pipeline.worker import Report
from lightning_echo.plan.plan import PlanShape


class Stream(IterableDataset):
    """Numbers, other ones in each pass; every example can be told from every other. Told the pass."""

    def __init__(self, *lengths):
        self.lengths, self.epochs, self.begun = lengths, [], 0

    def set_epoch(self, epoch):
        self.epochs.append(epoch)

    def __iter__(self):
        number, self.begun = self.begun, self.begun + 1
        for i in range(self.lengths[number % len(self.lengths)]):
            yield torch.tensor([1000 * number + i])


class Noise:
    """Numbers with noise."""

    def item(self):
        return torch.tensor([1000 * self.number + self.at, float(torch.rand(()))])


class Noisy(Noise, Ends, IterableDataset):
    pass


class NoisyRollsOver(Noise, RollsOver, IterableDataset):
    pass


class ItsOwnIterator(IterableDataset):
    """Numbers from a stream that is its own iterator and begins anew whenever it is asked for one, as litdata's does."""

    def __init__(self, length):
        self.length = length

    def __iter__(self):
        self.at = -1
        return self

    def __next__(self):
        self.at += 1
        if self.at == self.length:
            raise StopIteration
        return torch.tensor([self.at])


class SeededNoise:
    """A transform with a generator of its own, as MONAI's."""

    def __init__(self):
        self.seeds = []

    def set_random_state(self, seed=None, state=None):
        self.seeds.append(seed)


class DealtOutInStep(IterableDataset):
    """As MONAI's ``ShuffleBuffer``: every worker shuffles alike, by a generator of the stream's own, and takes its share."""

    def __init__(self, length, worker):
        self.length, self.worker, self.noise, self.generator = length, worker, SeededNoise(), random.Random(5)

    def set_random_state(self, seed=None, state=None):
        self.generator.seed(seed)

    def __iter__(self):
        numbers = list(range(self.length))
        for place in range(self.length):
            number = numbers.pop(self.generator.randrange(len(numbers)))
            if place % 2 == self.worker:
                yield torch.tensor([number])


def echo_of(dataset, batch_size=4, buffer_size=8, drop_last=False, collate_fn=list, turn=None):
    shape = PlanShape(
        batch_size=batch_size,
        last_batch_size=batch_size,
        batches_per_pass=1,
        workers=1,
        buffer_size=buffer_size,
        seed=0,
        distinct=False,
    )
    return StreamEcho(dataset, shape, key=1, collate_fn=collate_fn, drop_last=drop_last, turn=turn)


def fetch_pass(echo, number, factor, **request):
    """The batches of one pass as lists of numbers, and their reports."""
    batches, reports = [], []
    while True:
        examples, report, note = echo.fetch(StreamRequest(number, factor, **request))
        request = {}
        if examples is not None:
            batches.append([int(example[0]) for example in examples])
            reports.append(report)
        if note.ended:
            return batches, reports


class Chunks(IterableDataset):
    """Yields views of one buffer, which is filled again after each chunk."""

    def __init__(self, chunks, chunk_size):
        self.chunks, self.buffer = chunks, torch.zeros(chunk_size, 1)

    def __iter__(self):
        for chunk in range(self.chunks):
            self.buffer[:, 0] = torch.arange(len(self.buffer)) + chunk * len(self.buffer)
            yield from self.buffer


@pytest.mark.parametrize("collate_fn", [list, default_collate])
@pytest.mark.parametrize("factor", [1.0, 1.5, 4.0])
def test_a_stream_may_use_its_memory_again(collate_fn, factor):
    """A batch of 4 is a chunk, so that each batch of the plain loader is right; echoing pulls 1 to 3 for a batch."""
    echo = echo_of(Chunks(12, 4), collate_fn=collate_fn)
    uses = Counter(number for batch in fetch_pass(echo, 0, factor)[0] for number in batch)
    assert uses.keys() == set(range(48))  # each is what it was when it was yielded
    live = set(echo._held)
    assert all(count <= factor + 1 for number, count in uses.items())
    assert {int(example) for example in echo._held.values()} == live


class TestPasses:
    def test_a_stream_is_asked_for_an_iterator_once_in_a_pass(self):
        echo = echo_of(ItsOwnIterator(22))
        for number in range(3):
            batches, reports = fetch_pass(echo, number, 1.0)
            assert sorted(value for batch in batches for value in batch) == list(range(22))
            assert sum(report[0] for report in reports) == 22

    @pytest.mark.parametrize("drop_last", [False, True])
    @pytest.mark.parametrize("length", [1, 3, 4, 8, 11])
    def test_at_factor_1_the_batches_are_those_of_a_plain_loader(self, length, drop_last):
        echo = echo_of(Stream(length), drop_last=drop_last)
        for number in range(3):
            batches, reports = fetch_pass(echo, number, 1.0)
            expected = [list(range(start, min(start + 4, length))) for start in range(0, length, 4)]
            expected = [batch for batch in expected if len(batch) == 4 or not drop_last]
            assert batches == [[1000 * number + i for i in batch] for batch in expected]
            assert [report[:3] for report in reports] == [(len(batch), 0, 0) for batch in batches]

    @given(
        lengths=st.lists(st.integers(1, 40), min_size=1, max_size=4),
        factor=st.sampled_from([1.0, 1.5, 2.37, 4.0, 9.0]),
        batch_size=st.integers(1, 7),
        buffer=st.integers(1, 4),
        drop_last=st.booleans(),
    )
    @settings(deadline=None, max_examples=150)
    def test_every_example_is_fresh_once_and_used_by_the_factor(self, lengths, factor, batch_size, buffer, drop_last):
        buffer_size = max(buffer * batch_size, batch_size)
        echo = echo_of(Stream(*lengths), batch_size, buffer_size, drop_last)
        uses, seen, fresh_total = Counter(), set(), 0
        for number in range(len(lengths)):
            batches, reports = fetch_pass(echo, number, factor)
            first_uses = []
            for batch, (fresh, echoed, refetched, *_) in zip(batches, reports, strict=True):
                assert len(set(batch)) == len(batch) == fresh + echoed <= batch_size
                assert refetched == 0
                new = [value for value in batch if value not in seen]
                assert len(new) == fresh
                first_uses += new
                seen.update(batch)
                uses.update(batch)
            delivered = [1000 * number + i for i in range(lengths[number])]
            # In order and none left out, but for a last batch that is not full.
            assert first_uses == delivered[: len(first_uses)]
            assert len(first_uses) == lengths[number] or (drop_last and len(first_uses) > lengths[number] - batch_size)
            assert not drop_last or all(len(batch) == batch_size for batch in batches)
            fresh_total += len(first_uses)
        assert len(echo._held) <= buffer_size
        # What is live has uses left, and the start fills the buffer with few uses: apart from that the factor is met.
        assert sum(uses.values()) <= factor * fresh_total + 1
        assert sum(uses.values()) >= factor * (fresh_total - 2 * buffer_size) - batch_size

    @pytest.mark.parametrize(("length", "batch_size", "factor"), [(1, 4, 2), (5, 4, 2), (50, 8, 1.5), (25, 8, 2), (100, 32, 4)])
    def test_passes_that_end_within_a_batch_add_up_to_the_factor(self, length, batch_size, factor):
        """What each pass had too much, or too little, would be 40 times that."""
        echo, buffer_size = echo_of(Stream(length), batch_size, 2 * batch_size), 2 * batch_size
        reports = [report for number in range(40) for report in fetch_pass(echo, number, float(factor))[1]]
        fresh, echoed = (sum(report[i] for report in reports) for i in (0, 1))
        assert fresh == 40 * length
        assert factor * fresh - buffer_size * (factor - 1) <= fresh + echoed <= factor * fresh + 1

    def test_what_is_live_lives_on_into_the_next_pass(self):
        echo = echo_of(Stream(10))
        fetch_pass(echo, 0, 3.0)
        assert any(value < 1000 for batch in fetch_pass(echo, 1, 3.0)[0] for value in batch)

    def test_a_worker_whose_stream_has_ended_waits_for_the_others(self):
        echo = echo_of(Stream(4))
        fetch_pass(echo, 0, 2.0)
        live = dict(echo._held)
        for _ in range(3):
            examples, report, note = echo.fetch(StreamRequest(0, 2.0))
            assert (examples, report, note[:2]) == (None, Report(), (0, True))
        assert echo._held == live
        assert echo.dataset.begun == 1

    def test_a_stream_that_is_empty_has_ended(self):
        echo = echo_of(Stream(0))
        assert fetch_pass(echo, 0, 1.0) == ([], [])

    def test_the_pass_is_told_where_it_is_wanted(self):
        stream = Stream(5)
        echo = echo_of(stream)
        for number in range(3):
            fetch_pass(echo, number, 1.5)
        assert stream.epochs == [0, 1, 2]

    def test_nothing_is_done_when_nothing_is_wanted(self):
        stream = Stream(5)
        examples, _, note = echo_of(stream).fetch(StreamRequest(-1, 2.0))
        assert (examples, stream.begun, note.state) == (None, 0, None)

    def test_an_error_of_the_stream_says_where_it_came(self):
        class Broken(IterableDataset):
            def __iter__(self):
                yield torch.zeros(1)
                raise OSError("no such shard")

        with pytest.raises(OSError, match="no such shard") as raised:
            fetch_pass(echo_of(Broken(), batch_size=1), 0, 1.0)
        told = [str(raised.value), *getattr(raised.value, "__notes__", [])]  # Python 3.10 has no notes: it stands in the message
        assert " ".join(told) == "no such shard (reading the stream in pass 0, worker 0)"


class TestReuse:
    @pytest.mark.parametrize("factor", [2.0, 4.0])
    def test_a_new_factor_counts_from_the_next_batch_on(self, factor):
        echo = echo_of(Stream(10_000))
        plain = [echo.fetch(StreamRequest(0, 1.0))[1][:2] for _ in range(5)]
        changed = [echo.fetch(StreamRequest(0, factor))[1][:2] for _ in range(60)]
        again = [echo.fetch(StreamRequest(0, 1.0))[1][:2] for _ in range(5)]
        assert plain == again == [(4, 0)] * 5
        assert set(changed[10:]) == {(4 / factor, 4 - 4 / factor)}
        assert echo._held == {}

    def test_edits_of_what_is_handed_out_do_not_reach_the_next_use(self):
        echo = echo_of(Stream(200))
        for _ in range(60):
            examples, _, _ = echo.fetch(StreamRequest(0, 4.0))
            for example in examples:
                assert 0 <= int(example) < 200
                example.fill_(-1)

    def test_where_collating_copies_nothing_is_copied_before(self):
        echo = echo_of(Stream(200), collate_fn=default_collate)
        examples, _, _ = echo.fetch(StreamRequest(0, 4.0))
        assert any(example is held for example in examples for held in echo._held.values())

    def test_two_runs_draw_the_same_numbers_and_two_ranks_others(self):
        def noise(key):
            echo = echo_of(Noisy(30))
            echo._key = key
            return [[float(example[1]) for example in echo.fetch(StreamRequest(0, 2.0))[0]] for _ in range(9)]

        assert noise(1) == noise(1)
        assert not {value for batch in noise(1) for value in batch} & {value for batch in noise(2) for value in batch}


class TestStates:
    @pytest.mark.parametrize("kind", [Noisy, NoisyRollsOver])
    @pytest.mark.parametrize("factor", [1.0, 2.37, 4.0])
    def test_from_the_state_after_any_batch_a_run_goes_on_as_if_it_had_not_stopped(self, kind, factor):
        requests = [number for number in range(4) for _ in range(40)]
        echo = echo_of(kind(21, 5, 34))
        answers, states = [], []
        for number in requests:
            examples, report, note = echo.fetch(StreamRequest(number, factor))
            answers.append((examples and [example.tolist() for example in examples], report[:2], note.ended))
            states.append(note.state)
        assert {number for number, answer in zip(requests, answers, strict=True) if answer[2]} == {0, 1, 2, 3}
        for at in range(0, len(requests), 3):
            stream = kind(21, 5, 34)
            resumed, found, refetched = echo_of(stream), [], 0
            for number in requests[at + 1 :]:
                request = StreamRequest(number, factor, None if found else pickle.loads(pickle.dumps(states[at])))
                examples, report, note = resumed.fetch(request)
                found.append((examples and [example.tolist() for example in examples], report[:2], note.ended))
                refetched += report[2]
            assert found == answers[at + 1 :]
            assert refetched <= 40
            assert at < 3 or factor > 1 or refetched == 0

    def test_only_what_live_examples_need_is_pulled_again(self):
        echo = echo_of(Noisy(10_000))
        for _ in range(300):
            note = echo.fetch(StreamRequest(0, 2.0))[2]
        stream = Noisy(10_000)
        report = echo_of(stream).fetch(StreamRequest(0, 2.0, note.state))[1]
        oldest = min(echo._held)
        assert report[2] <= echo._plan.position - oldest + 2
        assert stream.read == report[2] + report[0]

    def test_where_nothing_is_live_nothing_is_pulled_again(self):
        echo = echo_of(Noisy(50))
        note = [echo.fetch(StreamRequest(0, 1.0))[2] for _ in range(3)][-1]
        stream = Noisy(50)
        examples, report, _ = echo_of(stream).fetch(StreamRequest(0, 1.0, note.state))
        assert [int(example[0]) for example in examples] == [12, 13, 14, 15]
        assert report[:3] == (4, 0, 0)
        assert stream.read == 4

    def test_without_a_state_of_the_stream_seeds_and_draws_go_on_by_the_number_of_batches(self):
        echo = echo_of(Stream(8, 40))
        first = len(fetch_pass(echo, 0, 1.0)[0])
        batches = fetch_pass(echo, 1, 1.0)[0]
        stream = Stream(8, 40)
        stream.begun = 1
        resumed = echo_of(stream)
        assert fetch_pass(resumed, 1, 1.0, resume=first)[0] == batches
        assert resumed._plan.number == echo._plan.number

    def test_a_state_is_a_value_of_its_own(self):
        echo = echo_of(Noisy(60))
        note = echo.fetch(StreamRequest(0, 3.0))[2]
        before = copy.deepcopy(pickle.loads(note.state))
        for _ in range(9):
            echo.fetch(StreamRequest(0, 3.0))
        assert pickle.loads(note.state) == before


def test_an_image_that_the_stream_only_opened_is_decoded_where_it_is_pulled(tmp_path):
    from PIL import Image

    path = tmp_path / "image.png"
    Image.new("L", (4, 4)).save(path)

    class Opened(IterableDataset):
        def __iter__(self):
            return iter([(Image.open(path), 1)])

    echo = echo_of(Opened(), batch_size=1)
    echo.fetch(StreamRequest(0, 2.0))
    (held,) = echo._held.values()
    assert type(held[0]) is Image.Image  # a copy of its pixels, not the opened file
    assert getattr(held[0], "fp", None) is None


class TestSeeds:
    def test_workers_of_a_rank_do_not_share_their_noise(self, monkeypatch):
        def noise(worker):
            info = SimpleNamespace(id=worker, num_workers=2, dataset=None)
            monkeypatch.setattr("lightning_echo.pipeline.streams.get_worker_info", lambda: info)
            return [float(example[1]) for example in echo_of(Noisy(30)).fetch(StreamRequest(0, 2.0))[0]]

        assert not set(noise(0)) & set(noise(1))

    def test_what_a_stream_shuffles_by_in_step_in_all_workers_is_left_alone(self, monkeypatch):
        """Else one worker's share of its order is not what the others leave: examples would come twice, others never."""

        def passes_of(worker):
            info = SimpleNamespace(id=worker, num_workers=2, dataset=None)
            monkeypatch.setattr("lightning_echo.pipeline.streams.get_worker_info", lambda: info)
            dataset = DealtOutInStep(30, worker)
            echo = echo_of(dataset)
            fresh = []
            for number in range(3):
                batches, reports = fetch_pass(echo, number, 2.0)
                firsts = zip(batches, reports, strict=True)
                fresh.append([example for batch, report in firsts for example in batch[: report.fresh]])
            return fresh, dataset.noise.seeds

        (one, one_seeds), (other, other_seeds) = passes_of(0), passes_of(1)
        assert [sorted(first + second) for first, second in zip(one, other, strict=True)] == [list(range(30))] * 3
        assert len(set(map(tuple, one))) == 3
        assert one_seeds  # what augments is seeded, and not alike
        assert not set(one_seeds) & set(other_seeds)

    def test_what_collating_draws_is_a_function_of_the_batch_whatever_was_drawn_before(self):
        def drawn(before):
            echo, values = echo_of(Noisy(90)), []
            for _ in range(40):
                echo.fetch(StreamRequest(0, 9.0))
                values.append(float(torch.rand(())))
                torch.rand(before)
            return values

        assert drawn(0) == drawn(5)
        assert len(set(drawn(0))) == 40


class Turn:
    """In place of the lock of all workers: says whether it is held."""

    held = False

    def __enter__(self):
        self.held = True

    def __exit__(self, *error):
        self.held = False


class Opened(Ends, IterableDataset):
    """Notes in which passes a first example was taken, and whether other workers had to wait meanwhile."""

    def __init__(self, turn, *lengths):
        super().__init__(*lengths)
        self.turn, self.noted = turn, []

    def set_epoch(self, epoch):
        assert self.turn.held

    def item(self):
        return torch.tensor([super().item()])

    def __iter__(self):
        for number, item in enumerate(super().__iter__()):
            if number == 0:
                self.noted.append((self.number, self.turn.held))
            yield item


def test_other_workers_wait_for_the_first_example_only_until_all_that_resume_have_caught_up():
    turn = Turn()
    echo = echo_of(Opened(turn, 21), turn=turn)
    fetch_pass(echo, 0, 4.0)
    _, _, note = echo.fetch(StreamRequest(1, 4.0))
    assert echo.dataset.noted == [(0, False), (1, False)]
    resumed = echo_of(Opened(turn, 21), turn=turn)
    fetch_pass(resumed, 1, 4.0, resume=note.state)
    for number in (2, 3):
        fetch_pass(resumed, number, 4.0)
    assert resumed.dataset.noted == [(0, True), (1, True), (2, True), (3, False)]
