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

The folders and files. Each imports only those that stand before it:

    log.py          the one logger
    saved.py        reading what was saved: errors name the field
    insertion.py    the insertion points: one table
    planning/       which example is used when: arithmetic without torch or data
    protecting/     copies, differences and random states: nothing of the user's is changed
    splitting/      where a data set is cut, and the proof that the cut is right
    caching/        examples that are kept for good, shared by the processes of a node
    workers/        what runs in worker processes: read or look up, augment, collate
    fetching/       from the plan to batches, in the main process
    sharing/        several trainings, one process that reads
    loading/        `EchoLoader`: epochs, their length, the state
    config.py       `EchoConfig`: the options as a value
    measuring/      clocks, costs, controllers
    reporting/      tables, text, pages and pictures of what was measured
    training/       Lightning's side: the training loader of a run, echoed
    datamodule.py   `EchoDataModule`
    monitoring/     what a training waits for, measured in its hooks; the decision; the log
    analysis/       `StallAnalyzer`: where the time of a training goes
    doctor/         what on this machine, or of a data module, would go wrong
    checkpoints.py  checkpoints between runs with and without echoing
    attachment.py   how `EchoCallback` puts echoing into a run
    callback.py     `EchoCallback`
    cli.py          `EchoCLI`
    __main__.py     ``lightning-echo``, the command: ``doctor``, ``report``, ``shared``

``lightning_echo/README.md`` explains the method, the folders, their files, and the way of one batch through them.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lightning_echo.log import set_up

if TYPE_CHECKING:
    from lightning_echo.analysis.analyzer import StallAnalyzer
    from lightning_echo.analysis.result import StallAnalysis
    from lightning_echo.caching.cache_config import CacheConfig
    from lightning_echo.caching.cached_dataset import CachedDataset
    from lightning_echo.caching.node_cache import CacheCounts
    from lightning_echo.callback import EchoCallback
    from lightning_echo.cli import EchoCLI
    from lightning_echo.config import EchoConfig
    from lightning_echo.datamodule import EchoDataModule
    from lightning_echo.insertion import InsertionPoint
    from lightning_echo.loading.loader import EchoLoader
    from lightning_echo.loading.state import EchoCounts, EchoStateError
    from lightning_echo.measuring.control import Controller, Decision, Observation, Reason
    from lightning_echo.measuring.guard import MetricGuard
    from lightning_echo.measuring.metrics import EchoCounter, IdleFraction
    from lightning_echo.measuring.schedule import FactorSchedule
    from lightning_echo.measuring.target_idle import TargetIdle
    from lightning_echo.sharing.serving import serve
    from lightning_echo.sharing.share_config import ShareConfig
    from lightning_echo.splitting.staged import StagedDataset

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
    "ShareConfig",
    "StagedDataset",
    "StallAnalysis",
    "StallAnalyzer",
    "TargetIdle",
    "serve",
]

set_up()

_IMPORTED_WHEN_ASKED = {
    "CacheConfig": "caching.cache_config",
    "CacheCounts": "caching.node_cache",
    "CachedDataset": "caching.cached_dataset",
    "Controller": "measuring.control",
    "Decision": "measuring.control",
    "EchoCLI": "cli",
    "EchoCallback": "callback",
    "EchoConfig": "config",
    "EchoCounter": "measuring.metrics",
    "EchoCounts": "loading.state",
    "EchoDataModule": "datamodule",
    "EchoLoader": "loading.loader",
    "EchoStateError": "loading.state",
    "FactorSchedule": "measuring.schedule",
    "IdleFraction": "measuring.metrics",
    "InsertionPoint": "insertion",
    "MetricGuard": "measuring.guard",
    "Observation": "measuring.control",
    "Reason": "measuring.control",
    "ShareConfig": "sharing.share_config",
    "StagedDataset": "splitting.staged",
    "StallAnalysis": "analysis.result",
    "StallAnalyzer": "analysis.analyzer",
    "TargetIdle": "measuring.target_idle",
    "serve": "sharing.serving",
}


def __getattr__(name: str) -> Any:
    """Imports a public name when it is asked for.

    A spawned worker imports this package, but needs neither Lightning nor torchmetrics: without them it starts seconds sooner.
    ``lightning-echo --help`` does not even need torch.
    """
    if name in _IMPORTED_WHEN_ASKED:
        return getattr(import_module(f"lightning_echo.{_IMPORTED_WHEN_ASKED[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
