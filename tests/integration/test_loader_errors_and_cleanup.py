"""Errors arrive as what they are, and nothing keeps running: no process, no thread, whatever ended the iteration."""

import contextlib
import gc
import os
import re
import signal
import subprocess
import sys
import threading
import weakref
from functools import partial
from pathlib import Path

import psutil
import pytest
import torch
from loader_cases import Stages, Values, nothing_left_behind, same, take, through_a_file, until, workers
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from lightning_echo import EchoLoader
from lightning_echo.loader.run import EchoRun
from lightning_echo.pipeline.journal import journal_path, read_journal

ROOT = Path(__file__).parents[2]


# torch says "DataLoader worker (pid 1) is killed by signal", unless the connection to the worker breaks first.
LOST_WORKER = (RuntimeError, OSError, EOFError)


class BrokenFile(Exception):
    pass


class Broken(Stages):
    """One example cannot be read, another one cannot be decoded, a third one cannot be augmented."""

    def __init__(self, load=None, decode=None, augment=None):
        super().__init__(40)
        self.bad_load, self.bad_decode, self.bad_augment = load, decode, augment

    def read(self, index):
        if index == self.bad_load:
            raise BrokenFile("unexpected end of file")
        return index

    def decode(self, raw):
        if raw == self.bad_decode:
            raise BrokenFile("no image")
        return torch.tensor([raw])

    def augment(self, example):
        if example.item() == self.bad_augment:
            raise BrokenFile("image is too small")
        return example


class BrokenBatched(Broken):
    def __getitems__(self, indices):
        return [self[index] for index in indices]


def broken(kind, num_workers, **options):
    return DataLoader(kind, batch_size=4, num_workers=num_workers, **options)


def said(error):
    return str(error) + " ".join(getattr(error, "__notes__", ()))


def cannot_be_stacked(examples):
    raise BrokenFile("cannot be stacked")


class BrokenBatches:
    def __iter__(self):
        yield torch.zeros(1)
        raise BrokenFile("connection lost")


@pytest.mark.parametrize(
    ("make", "workers", "point", "message", "where"),
    [
        (partial(Broken, load=17), 0, "after_augmentation", "unexpected end of file", "reading example 17 of the data set"),
        (partial(Broken, load=17), 1, "after_batching", "unexpected end of file", "reading example 17 of the data set"),
        (partial(Broken, decode=17), 1, "after_read", "no image", "(decoding and augmenting example 17 of the data set"),
        (partial(Broken, augment=17), 0, "before_augmentation", "image is too small", "(augmenting example 17 of the data set"),
        (
            partial(BrokenBatched, load=17),
            1,
            "after_augmentation",
            "unexpected end of file",
            "reading examples [16, 17, 18, 19]",
        ),
        (cannot_be_stacked, 1, "after_augmentation", "cannot be stacked", ""),
        (BrokenBatches, 0, "auto", "connection lost", ""),
    ],
    ids=["read", "read in batches", "decode", "augment", "read a whole batch", "collate", "iterable"],
)
def test_an_exception_arrives_with_its_type_its_message_the_index_and_the_stage(make, workers, point, message, where):
    if make is BrokenBatches:
        plain, factor = make(), 1
    elif make is cannot_be_stacked:
        plain, factor = broken(Values(8), workers, collate_fn=make), 2
    else:
        plain, factor = broken(make(), workers), 1 if make.func is BrokenBatched else 2
    loader = EchoLoader(plain, factor, insertion_point=point, seed=0)
    with nothing_left_behind(), pytest.raises(BrokenFile, match=message) as raised:
        take(loader, 40)
    assert where in said(raised.value)


def ends_at_eight(examples):
    if 8 in examples:
        raise StopIteration
    return torch.stack(examples)


def test_a_stop_iteration_in_the_collate_function_is_an_error_and_does_not_end_the_epoch():
    loader = EchoLoader(DataLoader(Broken(), batch_size=4, collate_fn=ends_at_eight, num_workers=1), 1)
    with pytest.raises(RuntimeError, match="StopIteration was raised while a batch was made"):
        list(loader)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_after_an_exception_the_loader_goes_on_at_the_batch_that_failed(num_workers):
    dataset = Broken(load=17)
    loader = EchoLoader(broken(dataset, num_workers), 2, insertion_point="after_augmentation", seed=0)
    expected = take(EchoLoader(broken(Broken(), num_workers), 2, insertion_point="after_augmentation", seed=0), 20)
    delivered = []
    with pytest.raises(BrokenFile) as raised:  # noqa: PT012
        for batch in loader:
            delivered.append(batch)
    dataset.bad_load = None
    delivered += take(loader, 20 - len(delivered))
    assert same(delivered, expected)
    del raised


class Interrupts:
    """Raises KeyboardInterrupt once, as Python does between two of its steps: before the ``at``-th line of the loader's own code.

    Lines after `EchoRun.fetch` are left out: what happens between there and the training's own code nobody can tell from an
    interrupt in the training.
    """

    def __init__(self, at):
        self.at, self.lines, self.raised = at, 0, False

    def __call__(self, frame, event, argument):
        name = frame.f_code.co_filename
        folder = os.path.basename(os.path.dirname(name))
        if folder not in ("plan", "pipeline", "loader") or "close" in frame.f_code.co_name:
            return None
        return self.line

    def line(self, frame, event, argument):
        if event == "return" and frame.f_code is EchoRun.fetch.__code__:
            self.lines = -(10**9)
        if event == "line" and not self.raised:
            self.lines += 1
            if self.lines == self.at:
                self.raised = True
                raise KeyboardInterrupt
        return self.line


class Own(Sampler):
    """A sampler class of the user's: no thread may run it."""

    def __iter__(self):
        return iter(range(39, -1, -1))

    def __len__(self):
        return 40


def under_interrupts(num_workers, factor, point, own, folder=None):
    plain = broken(Broken(), num_workers, sampler=Own() if own else None)
    # Without an echo, and with one worker, batches follow from the order.
    of_demand = {"max_factor": 1, "journal": folder} if factor == "demand" else {}
    return EchoLoader(plain, factor, insertion_point=point, seed=0, **of_demand)


OWN = pytest.mark.filterwarnings("ignore:lightning_echo. Own has neither state_dict")  # the same order in each pass
INTERRUPTED = pytest.mark.parametrize(
    ("factor", "point", "num_workers", "own", "every"),
    [
        (2, "after_augmentation", 0, False, 5),
        (2, "after_batching", 0, False, 5),
        (2, "after_augmentation", 1, False, 13),
        ("demand", "after_augmentation", 0, False, 5),
        pytest.param("demand", "after_augmentation", 1, True, 13, marks=OWN),
    ],
)


@contextlib.contextmanager
def tracing(trace):
    before = sys.gettrace()
    gc.disable()  # an earlier loader that dies here calls its weak references' callbacks, where Python drops an interrupt
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)
        gc.enable()


@pytest.mark.slow
@INTERRUPTED
def test_an_interrupt_anywhere_before_a_batch_is_handed_out_loses_none_and_repeats_none(factor, point, num_workers, own, every):
    interrupted, undisturbed = (under_interrupts(num_workers, factor, point, own) for _ in range(2))
    batches = 6 if factor == "demand" else 2  # on demand, the last four batches are not booked yet
    at, in_vain = 1, 0
    while in_vain < 2:  # a fetch takes fewer lines where all of its batch is echoed
        interrupts, delivered = Interrupts(at), []
        with contextlib.suppress(KeyboardInterrupt), tracing(interrupts):
            delivered += take(interrupted, 1)
        assert interrupts.raised == (delivered == [])
        delivered += take(interrupted, batches - len(delivered))
        assert same(delivered, take(undisturbed, batches)), at
        found, expected = interrupted.counts, undisturbed.counts
        assert (found.fresh, found.echoed) == (expected.fresh, expected.echoed)
        in_vain = 0 if interrupts.raised else in_vain + 1
        at += every
    assert at > 200
    interrupted.close(), undisturbed.close()


class Saves(Interrupts):
    """Saves the state once, as a signal handler does (Slurm's), in place of an interrupt."""

    def __init__(self, at, loader):
        super().__init__(at)
        self.loader, self.state = loader, None

    def line(self, frame, event, argument):
        try:
            return super().line(frame, event, argument)
        except KeyboardInterrupt:
            self.state = self.loader.state_dict()
        return self.line


@pytest.mark.slow
@INTERRUPTED
def test_a_state_that_a_signal_handler_saves_anywhere_before_a_batch_is_handed_out_continues_with_that_batch(
    tmp_path, factor, point, num_workers, own, every
):
    running, resumed = (under_interrupts(num_workers, factor, point, own, folder) for folder in (tmp_path, None))
    at, in_vain, before = 1, 0, 0
    while in_vain < 2:
        saves = Saves(at, running)
        with tracing(saves):
            delivered = take(running, 1)
        delivered += take(running, 5)
        if saves.state is not None:
            counted = saves.state["delivered"] - before  # it is, just before it is handed out
            assert counted in (0, 1)
            resumed.load_state_dict(through_a_file(saves.state))
            assert same(take(resumed, 5), delivered[counted : counted + 5]), at
        in_vain = 0 if saves.raised else in_vain + 1
        at, before = at + 2 * every, before + 6
    assert at > 200
    running.close(), resumed.close()
    if factor == "demand":
        (stretch,) = read_journal(journal_path(tmp_path, "", 0)).stretches
        noted = [position for number in range(stretch.end) for position in stretch.fresh_in(number)]
        assert noted == list(range(4 * before))


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_exception_that_is_over_keeps_no_loader_alive(num_workers):
    gc.collect()
    gc.disable()  # references alone must do
    try:
        loader = EchoLoader(broken(Broken(load=17), num_workers), 2, insertion_point="after_augmentation", seed=0)
        with contextlib.suppress(BrokenFile):
            take(loader, 40)
        reference = weakref.ref(loader)
        del loader
        assert reference() is None
    finally:
        gc.enable()


@pytest.fixture
def only_lost_workers_reported(monkeypatch):
    """torch's signal handler raises wherever the training is by then: also in destructors, where Python can only report it.

    Not ours: a file that psutil has just opened, and a temporary file without a name, which this package does not make.
    """
    allowed = (
        r"RuntimeError\('DataLoader worker .* is killed by signal|"
        r"ResourceWarning\(.unclosed file <_io.Buffered\w+ name='/(proc/\d+/stat|tmp)'"
    )
    reported = []
    # As texts, since what an exception refers to lives on with it.
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: reported.append(repr(unraisable.exc_value)))
    gc.collect()
    reported.clear()  # what an earlier test has left open (a logger's temporary file) is not of this one
    yield
    gc.collect()
    assert [error for error in reported if not re.match(allowed, error)] == []


class Waiting(Dataset):
    """Keeps its workers waiting in a few examples, until a file is there; so a batch of each of two workers is on its way."""

    def __init__(self, file):
        self.file = file

    def __getitem__(self, index):
        if index >= 24:
            until(self.file.exists, seconds=60)
        return index

    def __len__(self):
        return 40


def in_a_thread(target):
    """Runs it in a thread, where a training may run; torch's signal handler raises in the main thread all the same."""
    thread = threading.Thread(target=target)
    thread.start()
    while True:
        with contextlib.suppress(RuntimeError):
            thread.join()
            return


@pytest.mark.slow
@pytest.mark.usefixtures("only_lost_workers_reported")
@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("run", "waits", "point"),
    [(lambda target: target(), True, "after_augmentation"), (in_a_thread, False, "after_batching")],
    ids=["waiting", "a thread, by batches"],
)
def test_a_killed_worker_is_named_and_the_next_epoch_goes_on_with_new_ones(tmp_path, run, waits, point):
    file, delivered, killed, errors = tmp_path / "go on", [], [], []
    loader = EchoLoader(DataLoader(Waiting(file), batch_size=4, num_workers=2), 1, insertion_point=point)
    before = workers()

    def kill():
        os.kill(killed[0], signal.SIGKILL)

    def train():
        try:
            for batch in loader:
                delivered.append(batch)
                if len(delivered) == (6 if waits else 3):
                    killed.append(min(workers() - before))
                    if waits:
                        threading.Timer(0.5, kill).start()
                    else:
                        kill()
                        until(lambda: killed[0] not in workers())
        except LOST_WORKER as error:
            errors.append(error)

    with nothing_left_behind():
        run(train)
        assert [str(error).strip() for error in errors] == [f"DataLoader worker (pid {killed[0]}) is killed by signal: Killed."]
        errors.clear()
        loader.close()  # as a Trainer does: the error may have been raised in the training's own code
        file.touch()
        delivered += take(loader, 10 - len(delivered))
        loader.close()
    assert [index for batch in delivered for index in batch.tolist()] == list(range(40))


class BrokenStream(IterableDataset):
    def __init__(self, **bad):
        self.dataset = Broken(**bad)

    def __iter__(self):
        return (self.dataset[index] for index in range(len(self.dataset)))


@pytest.mark.parametrize(("kind", "where"), [(Broken, "read"), (BrokenStream, "init"), (BrokenStream, "collate")])
def test_an_exception_of_a_class_that_cannot_be_sent_arrives_as_its_nearest_class_that_can(where, kind):
    class Local(BrokenFile):
        def __init__(self, message):
            super().__init__(message)

    def fails(*_):
        raise Local("lost in the worker")

    dataset = kind()
    if where == "read":
        getattr(dataset, "dataset", dataset).decode = lambda raw: fails() if raw == 17 else torch.tensor([raw])
    at = {"collate": {"collate_fn": fails}, "init": {"worker_init_fn": fails}}.get(where, {})
    plain = broken(dataset, 2, timeout=20, **at)  # torch alone would wait for ever, or end the epoch of a stream
    loader = EchoLoader(plain, 1, insertion_point="after_augmentation")
    with nothing_left_behind(), pytest.raises(BrokenFile, match="Local: lost in the worker"):
        list(loader)


def test_dropping_the_last_reference_within_an_epoch_ends_workers_and_thread():
    with nothing_left_behind():
        before, threads = workers(), threading.enumerate()
        loader = EchoLoader(DataLoader(Values(400), batch_size=4, num_workers=2), 2, insertion_point="after_augmentation")
        iterator = iter(loader)
        next(iterator)
        assert len(workers() - before) == 2
        mine = [each for each in threading.enumerate() if each.name.startswith("lightning_echo") and each not in threads]
        assert [(thread.name, thread.daemon) for thread in mine] == [("lightning_echo-prefetch", True)]
        del mine
        gc.disable()  # references alone must do
        try:
            del loader, iterator
            assert until(lambda: workers() == before)
        finally:
            gc.enable()


def test_close_ends_workers_that_a_loader_itself_would_keep_and_the_next_epoch_goes_on():
    def plain():
        return DataLoader(Values(24), batch_size=None, num_workers=2, persistent_workers=True)

    whole = EchoLoader(plain(), 2, seed=5)
    expected = take(whole, 10)
    kept = plain()
    loader = EchoLoader(kept, 2, seed=5)
    with nothing_left_behind():
        found = take(loader, 5)
        loader.close()
        loader.close()
    assert kept._iterator is None
    assert same(found + take(loader, 5), expected)
    whole.close(), loader.close()


PROGRAM = """
import os, signal, threading
import psutil
from torch.utils.data import DataLoader
from loader_cases import Values
from lightning_echo import EchoLoader

if __name__ == "__main__":
    child = os.fork()  # it ends by itself, the other one is interrupted
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) if child else None
    loader = EchoLoader(DataLoader(Values(400), batch_size=4, num_workers=2), 2, insertion_point="after_augmentation")
    iterator = iter(loader)
    next(iterator)
    print(*[child.pid for child in psutil.Process().children()], flush=True)
    if child:
        print(status, flush=True)
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
        while True:
            for batch in iterator:  # it is interrupted while it fetches
                pass
            iterator = iter(loader)
"""


@pytest.mark.program
@pytest.mark.own_interpreter  # sees how an interpreter ends
@pytest.mark.timeout(120)
def test_a_program_that_ends_or_is_interrupted_with_a_running_loader_takes_its_workers_along(tmp_path):
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{Path(__file__).parent}"}
    ended = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, timeout=100)
    assert ended.returncode == -signal.SIGINT, ended.stderr
    of_child, of_program, status = ended.stdout.splitlines()
    assert status == "0", ended.stderr
    pids = [int(pid) for line in (of_child, of_program) for pid in line.split()]
    assert len(pids) == 4
    assert until(lambda: not any(psutil.pid_exists(pid) for pid in pids))
    said = [line.strip() for line in ended.stderr.splitlines() if "live examples" not in line]
    assert said[-1:] == ["KeyboardInterrupt"]
    assert said.count("KeyboardInterrupt") == 1
