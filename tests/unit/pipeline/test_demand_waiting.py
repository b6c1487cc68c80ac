"""What is said of a training that waits on demand: it names the example, and saying it never ends a training."""

from time import perf_counter
from types import SimpleNamespace

import pytest
from torch.utils.data import DataLoader

from lightning_echo.pipeline.demand import Waiting
from lightning_echo.pipeline.demand_worker import Words
from lightning_echo.pipeline.prefetch import WorkerProcesses

FILES, NEXT = {7: "seven.png"}, "the next example of the data set"


@pytest.mark.parametrize(
    ("reads", "named"),
    [
        (3, "example 7 of the data set (seven.png)"),
        (4, "the next example of the data set"),
        (-1, "the next example of the data set"),
    ],
)
def test_the_example_that_the_worker_reads_is_named_if_it_is_known(reads, named, monkeypatch):
    monkeypatch.setattr("lightning_echo.pipeline.demand.file_of", lambda dataset: FILES.__getitem__)
    words, said = Words(DataLoader(range(4))), []
    if reads is not None:
        words.read(0, reads)
    requests = SimpleNamespace(index_of={0: 5, 3: 7}.get, next_worker=0)
    waiting = Waiting(requests, WorkerProcesses(), None, 0, said.append, words)
    waiting.since = perf_counter() - 11
    assert waiting.lost(0.0) is None
    assert not said  # the first batch waits for the workers to start
    waiting.has_begun = True
    assert [waiting.lost(0.0) for _ in range(2)] == [None, None]
    (message,) = said
    assert message.startswith(f"the training has waited 11 s for fresh examples: {named} is not read yet.")
    waiting.timeout = 5
    assert str(waiting.lost(0.0)) == f"DataLoader timed out after 5 seconds: {named} is not read"
