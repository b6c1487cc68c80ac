"""What loggers have written, read back from their own files: the same shape for each, so that a test asks all of them alike.

=========== ===================================================================================
CSV         ``metrics.csv`` and ``hparams.yaml``, by csv and yaml
TensorBoard event files, by TensorBoard's own reader
MLflow      its store, a folder of files, by MLflow's own client
W&B         ``run-*.wandb``: what `wandb sync` would send. Nothing public reads it, see `_wandb_records`
=========== ===================================================================================
"""

from __future__ import annotations

import csv
import json
import struct
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from lightning.pytorch.loggers import CSVLogger, Logger, MLFlowLogger, TensorBoardLogger, WandbLogger


@dataclass
class Logged:
    """What the files of a run say.

    Attributes:
        steps: By step the metrics that were logged there, by their names: ``logged.steps[5]["epoch"]``.
        options: The hyperparameters of echoing by their names, as text.
    """

    steps: dict[int, dict[str, float]] = field(default_factory=lambda: defaultdict(dict))
    options: dict[str, str] = field(default_factory=dict)

    def of(self, metric: str) -> dict[int, float]:
        """Returns a metric's values by step."""
        return {step: values[metric] for step, values in sorted(self.steps.items()) if metric in values}

    def take_options(self, hyperparameters: dict[str, Any]) -> None:
        self.options |= {name: str(value) for name, value in hyperparameters.get("echo", {}).items()}


class Kind(NamedTuple):
    """A logger and its files."""

    make: Callable[[Path, int], Logger]  # one that writes into a folder; for a run's second start, the one that resumes there
    read: Callable[[Path], Logged]  # what all starts of the run have written


def _make_csv(folder: Path, start: int) -> Logger:
    return CSVLogger(folder, name="csv", version=start)  # in the same folder it would begin its files anew


def _read_csv(folder: Path) -> Logged:
    logged = Logged()
    for path in sorted(folder.glob("csv/version_*")):
        with (path / "metrics.csv").open() as file:
            for row in csv.DictReader(file):
                logged.steps[int(row["step"])] |= {name: float(text) for name, text in row.items() if text and name != "step"}
        logged.take_options(yaml.safe_load((path / "hparams.yaml").read_text()))
    return logged


def _make_tensorboard(folder: Path, start: int) -> Logger:
    del start
    return TensorBoardLogger(folder, name="tensorboard", version=0)


def _read_tensorboard(folder: Path) -> Logged:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    path, logged = folder / "tensorboard" / "version_0", Logged()
    events = EventAccumulator(str(path)).Reload()
    for name in events.Tags()["scalars"]:
        for event in events.Scalars(name):
            logged.steps[event.step][name] = event.value
    started = events.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    found = HParamsPluginData.FromString(started).session_start_info.hparams
    for name, value in found.items():
        if name.startswith("echo/"):
            plain = getattr(value, value.WhichOneof("kind"))  # TensorBoard has no integers
            logged.options[name.removeprefix("echo/")] = f"{plain:g}" if isinstance(plain, float) else str(plain)
    return logged


def _make_mlflow(folder: Path, start: int) -> Logger:
    uri = f"file:{folder}/mlruns"
    return MLFlowLogger("digits", tracking_uri=uri, run_id=_mlflow_run(uri).info.run_id if start else None)


def _read_mlflow(folder: Path) -> Logged:
    from mlflow.tracking import MlflowClient

    uri = f"file:{folder}/mlruns"
    run, logged = _mlflow_run(uri), Logged()
    for name in run.data.metrics:
        for metric in MlflowClient(uri).get_metric_history(run.info.run_id, name):
            logged.steps[metric.step][name] = metric.value
    parameters = {name.split("/", 1)[1]: value for name, value in run.data.params.items() if name.startswith("echo/")}
    logged.take_options({"echo": parameters})
    return logged


def _mlflow_run(uri: str) -> Any:
    from mlflow.tracking import MlflowClient

    client = MlflowClient(uri)
    experiment = client.get_experiment_by_name("digits")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    return run


def _make_wandb(folder: Path, start: int) -> Logger:
    folder = folder / f"start-{start}"  # W&B names its own folders by the second
    return WandbLogger(project="digits", id="the-run", save_dir=folder, offline=True, resume="allow" if start else None)


def _read_wandb(folder: Path) -> Logged:
    logged = Logged()
    for path in sorted(folder.glob("start-*/wandb/offline-run-*/run-the-run.wandb")):
        for record in _wandb_records(path):
            if values := _wandb_values(record.history.item):
                metrics = {name: value for name, value in values.items() if not name.startswith(("_", "trainer/"))}
                logged.steps[values["trainer/global_step"]] |= metrics
            logged.take_options(_wandb_values(record.config.update))
    return logged


def _wandb_values(items: Any) -> dict[str, Any]:
    return {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}


def _wandb_records(path: Path) -> Iterator[Any]:
    """Yields the records of a ``.wandb`` file: W&B's messages in LevelDB's log format.

    After seven bytes of W&B's own, pieces of records stand in blocks of 32 KiB: checksum, length and kind, then so many bytes.
    A piece is all of a record (kind 1), or its first, a middle or its last one (2, 3, 4). Less than seven bytes at a block's end
    are void.
    """
    from wandb.proto.wandb_internal_pb2 import Record

    content = path.read_bytes()
    assert content.startswith(b":W&B")
    at, record = 7, b""
    while at + 7 <= len(content):
        if (left := 2**15 - at % 2**15) < 7:
            at += left
            continue
        _, length, kind = struct.unpack_from("<IHB", content, at)
        record, at = record + content[at + 7 : at + 7 + length], at + 7 + length
        if kind in (1, 4):
            yield Record.FromString(record)
            record = b""


KINDS = {
    "CSV": Kind(_make_csv, _read_csv),
    "TensorBoard": Kind(_make_tensorboard, _read_tensorboard),
    "MLflow": Kind(_make_mlflow, _read_mlflow),
    "W&B": Kind(_make_wandb, _read_wandb),
}
NEEDED = {"TensorBoard": "tensorboard", "MLflow": "mlflow", "W&B": "wandb"}


def skip_unless_installed(name: str) -> None:
    """Skips a test of a logger whose package is not there: it comes with the extra `test-configs`."""
    if name in NEEDED:
        pytest.importorskip(NEEDED[name], reason=f"{NEEDED[name]} is not installed")


def close(logger: Logger) -> None:
    """Ends the run of a logger, so that its files are whole."""
    logger.finalize("success")
    if isinstance(logger, WandbLogger):
        logger.experiment.finish()
        sys.modules["wandb"].teardown()  # when the process that writes has ended, all is written


@contextmanager
def staying_here(folder: Path) -> Iterator[None]:
    """Lets loggers write nothing outside a folder, and ask nobody on a network."""
    folders = dict.fromkeys(("WANDB_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR"), str(folder))
    others = {
        "WANDB_MODE": "offline",
        "WANDB_SILENT": "true",
        "WANDB_CONSOLE": "off",
        "WANDB_ERROR_REPORTING": "false",
        "WANDB_DISABLE_GIT": "true",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "MLFLOW_ALLOW_FILE_STORE": "true",  # MLflow 3 refuses a folder of files without it
    }
    with pytest.MonkeyPatch.context() as monkeypatch:
        for name, value in {**folders, **others}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.chdir(folder)
        yield
        if (wandb := sys.modules.get("wandb")) is not None:
            wandb.teardown()  # ends the process that W&B writes with
