"""Which logger gets a text by which of its own methods; what arrives in its files is tested with a Trainer."""

from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from lightning.pytorch.loggers import CometLogger, MLFlowLogger, TensorBoardLogger, WandbLogger
from lightning.pytorch.utilities import rank_zero_only

from lightning_echo.training.logged import log_text


def logger_of(kind):
    """A logger whose own client only remembers what it is asked for; its package need not be there."""

    class Fake(kind):
        client = Mock()
        experiment, run_id, log_text = client, "run", client.log_table

        def __init__(self):
            self.client.reset_mock()

    return Fake()


@pytest.mark.parametrize(
    ("kind", "asked"),
    [
        (TensorBoardLogger, ("add_text", ("echo/summary", "    one\n      two", 7), {})),
        (WandbLogger, ("log_table", ("echo/summary",), {"columns": ["summary"], "data": [["one\n  two"]], "step": 7})),
        (MLFlowLogger, ("log_text", ("run", "one\n  two", "echo/summary.txt"), {})),
        (CometLogger, ("log_text", ("one\n  two",), {"step": 7, "metadata": {"name": "echo/summary"}})),
    ],
)
def test_each_logger_is_given_the_text_as_it_takes_it(kind, asked):
    logger = logger_of(kind)
    log_text(SimpleNamespace(loggers=[logger]), "echo/summary", "one\n  two", 7)
    assert [tuple(call) for call in logger.client.mock_calls] == [asked]


def test_no_rank_but_the_first_logs_it(monkeypatch):
    monkeypatch.setattr(rank_zero_only, "rank", 1)
    logger = logger_of(MLFlowLogger)
    log_text(SimpleNamespace(loggers=[logger]), "echo/summary", "one", 7)
    assert logger.client.mock_calls == []
