"""Data echoing for PyTorch Lightning: when reading data is the bottleneck, use every example it delivers more than once.

The input pipeline, and where the echo stage can stand (Choi et al. 2019, arXiv 1907.05550)::

    index --read--> raw --decode--> example --augment--> example' --collate--> batch --transfer--> device batch --> step
                   ^               ^                    ^                     ^                    ^
           after_read  before_augmentation     after_augmentation      after_batching       after_transfer

Words, the same in code, logs and docs:

    fresh example    first use of an example after the stage before the insertion point produced it
    echoed example   every further use of that same output
    echo factor e    uses per fresh example, a real number >= 1; 1 = no echoing
    insertion point  where in the pipeline the echo stage stands
    pass             what the plain loader would deliver in one epoch
    epoch            what Lightning calls an epoch: one exhaustion of the train loader
    live example     read, used at least once, uses left
    buffer           the live examples (or batches) that echoes are drawn from
    idle fraction    share of training time in which the accelerator had nothing to do because input was not there

`EchoCallback` echoes what a Trainer trains on, `EchoDataModule` a data module, `EchoLoader` a loader; `EchoConfig` holds their
options. How it works: ``lightning_echo/README.md``. `StallAnalyzer` measures what a training waits for, and says what would help.
"""

import logging
from importlib import import_module
from typing import TYPE_CHECKING, Any

from lightning_echo.config import EchoConfig
from lightning_echo.insertion import InsertionPoint
from lightning_echo.loading.counts import EchoCounts
from lightning_echo.loading.loader import EchoLoader
from lightning_echo.loading.state import EchoStateError
from lightning_echo.measuring.control import Controller, Decision, Observation, Reason
from lightning_echo.measuring.guard import MetricGuard
from lightning_echo.measuring.schedule import FactorSchedule
from lightning_echo.measuring.target_idle import TargetIdle
from lightning_echo.splitting.staged import StagedDataset

if TYPE_CHECKING:
    from lightning_echo.analysis.analyzer import StallAnalyzer
    from lightning_echo.analysis.result import StallAnalysis
    from lightning_echo.callback import EchoCallback
    from lightning_echo.cli import EchoCLI
    from lightning_echo.datamodule import EchoDataModule
    from lightning_echo.measuring.metrics import EchoCounter, IdleFraction

__version__ = "0.1.0"
__all__ = [
    "Controller",
    "Decision",
    "EchoCLI",
    "EchoCallback",
    "EchoConfig",
    "EchoCounter",
    "EchoCounts",
    "EchoDataModule",
    "EchoLoader",
    "EchoStateError",
    "FactorSchedule",
    "IdleFraction",
    "InsertionPoint",
    "MetricGuard",
    "Observation",
    "Reason",
    "StagedDataset",
    "StallAnalysis",
    "StallAnalyzer",
    "TargetIdle",
]

# Like Lightning's own logger: what was chosen is seen in a default run, unless the program has set logging up itself.
_logger = logging.getLogger(__name__)
_logger.setLevel(logging.INFO)
if not logging.getLogger().hasHandlers():
    _logger.addHandler(logging.StreamHandler())
    _logger.propagate = False

_LATER = {
    "EchoCLI": "cli",
    "EchoCallback": "callback",
    "EchoCounter": "measuring.metrics",
    "EchoDataModule": "datamodule",
    "IdleFraction": "measuring.metrics",
    "StallAnalysis": "analysis.result",
    "StallAnalyzer": "analysis.analyzer",
}


def __getattr__(name: str) -> Any:
    """Imports Lightning and torchmetrics only where needed: a spawned worker, which needs neither, starts seconds sooner."""
    if name in _LATER:
        return getattr(import_module(f"lightning_echo.{_LATER[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
