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

What to use:

* `EchoCallback` echoes the loader that a Trainer trains on, `EchoDataModule` the loader of a data module. `EchoLoader` echoes a
  loader without either. `EchoConfig` holds their options, `CacheConfig` those of a cache, `ShareConfig` those of sharing.
* `CachedDataset` keeps the examples of a data set for any ``DataLoader``: validation, prediction, other frameworks.
* `TargetIdle` and other controllers decide on the echo factor from epoch to epoch.
* `serve` reads for the trainings of a name, in the foreground; without it, the first training starts a process that does.
* `StallAnalyzer` measures what a training waits for, and tells what would help.

``lightning_echo/README.md`` has the map of the folders and files, the method, and the way of one batch through them.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lightning_echo.log import set_up

if TYPE_CHECKING:
    from lightning_echo.analysis.analyzer import StallAnalyzer
    from lightning_echo.analysis.result import StallAnalysis
    from lightning_echo.cache.kept import CacheConfig
    from lightning_echo.cache.loader_cache import CachedDataset
    from lightning_echo.cache.node_cache import CacheCounts
    from lightning_echo.callback import EchoCallback
    from lightning_echo.cli import EchoCLI
    from lightning_echo.config import EchoConfig
    from lightning_echo.datamodule import EchoDataModule
    from lightning_echo.insertion import InsertionPoint
    from lightning_echo.loader.loader import EchoLoader
    from lightning_echo.loader.state import EchoCounts
    from lightning_echo.measure.control import Controller, Decision, Observation, Reason
    from lightning_echo.measure.guard import FactorSchedule, MetricGuard
    from lightning_echo.measure.target_idle import TargetIdle
    from lightning_echo.measure.timing import EchoCounter, IdleFraction
    from lightning_echo.pipeline.journal import Replay
    from lightning_echo.schema import EchoStateError
    from lightning_echo.share.config import ShareConfig
    from lightning_echo.share.sharing import serve
    from lightning_echo.split.staged import StagedDataset

__version__ = "0.1.0"
__all__ = [
    "CacheConfig",
    "CacheCounts",
    "CachedDataset",
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
    "Replay",
    "ShareConfig",
    "StagedDataset",
    "StallAnalysis",
    "StallAnalyzer",
    "TargetIdle",
    "serve",
]

set_up()

_IMPORTED_WHEN_ASKED = {
    "CacheConfig": "cache.kept",
    "CacheCounts": "cache.node_cache",
    "CachedDataset": "cache.loader_cache",
    "Controller": "measure.control",
    "Decision": "measure.control",
    "EchoCLI": "cli",
    "EchoCallback": "callback",
    "EchoConfig": "config",
    "EchoCounter": "measure.timing",
    "EchoCounts": "loader.state",
    "EchoDataModule": "datamodule",
    "EchoLoader": "loader.loader",
    "EchoStateError": "schema",
    "FactorSchedule": "measure.guard",
    "IdleFraction": "measure.timing",
    "InsertionPoint": "insertion",
    "MetricGuard": "measure.guard",
    "Observation": "measure.control",
    "Reason": "measure.control",
    "Replay": "pipeline.journal",
    "ShareConfig": "share.config",
    "StagedDataset": "split.staged",
    "StallAnalysis": "analysis.result",
    "StallAnalyzer": "analysis.analyzer",
    "TargetIdle": "measure.target_idle",
    "serve": "share.sharing",
}


def __getattr__(name: str) -> Any:
    """Imports a public name when it is asked for.

    A spawned worker imports this package, but needs neither Lightning nor torchmetrics: without them it starts seconds sooner.
    ``lightning-echo --help`` does not even need torch.
    """
    if name in _IMPORTED_WHEN_ASKED:
        return getattr(import_module(f"lightning_echo.{_IMPORTED_WHEN_ASKED[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
