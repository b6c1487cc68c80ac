"""The command ``analyze`` of an `EchoCLI`: its Trainer, the files that it writes, and the advice as options."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from itertools import count
from pathlib import Path
from textwrap import wrap
from typing import Any, cast

import lightning.pytorch as pl
from lightning.pytorch.utilities import rank_zero_only

from lightning_echo.analysis.analyzer import StallAnalyzer
from lightning_echo.analysis.predict import TrainingSetting
from lightning_echo.analysis.report import in_words, report, save_page, save_png
from lightning_echo.analysis.result import StallAnalysis, to_keep
from lightning_echo.split.reading import AUTO_IN_FLIGHT
from lightning_echo.training.trainer import rank_zero_info

# ---------------------------------------------------------------------- outputs
# The files that ``analyze`` writes. A name that the user gives is checked before the analysis begins: no measurement is lost.
# Without a name, the analysis itself goes into the Trainer's log directory.


def check_new(**paths: str | None) -> None:
    """Raises a ValueError for names of files that exist already, and for equal names. None: no file is asked for."""
    seen: dict[Path, str] = {}
    for name, path in paths.items():
        if path is None:
            continue
        if Path(path).exists():
            raise ValueError(f"{name} must be a new file, got {path!r}, which exists: give another name, or remove it first")
        first = seen.setdefault(Path(path).absolute(), name)
        if first != name:
            raise ValueError(f"{first} and {name} must be different files, got {path!r} for both")


def free_path(directory: Path, name: str) -> Path:
    """Returns the path of a new file in the directory: ``analysis.json``, else ``analysis_1.json`` and so on."""
    wanted = directory / name
    numbered = (wanted.with_stem(f"{wanted.stem}_{number}") for number in count(1))
    return wanted if not wanted.exists() else next(path for path in numbered if not path.exists())


# ---------------------------------------------------------------------- advice

_WIDTH = 118
_HOW = "What `analyze` advises. Give this file after your own: fit --config config.yaml --config THIS_FILE"
_LOADER = "Set {name}={value} where your program sets it: only you know the name of that option (now {now})."
_NONE_FASTER = "None of what was tried is proved to be faster: keep what you have."
_NOTHING = "There is nothing to set in the group echo: this file changes nothing."


def advice_yaml(analysis: StallAnalysis) -> str:
    """Returns the advice as YAML for an `EchoCLI`: options of the group ``echo``, and the rest as comments.

    Where settings were proved, it is the one to keep. Workers of a cluster are not tried, so an advice with them stays.
    """
    verdict, stages = analysis.verdict, analysis.stages
    setting, options = verdict.setting, verdict.options
    comments = [_HOW, verdict.message]
    if analysis.proved and not setting.cluster_workers:
        kept = to_keep(analysis.proved)
        setting = TrainingSetting() if kept is None else kept.setting
        options = setting.options
        comments.append(_NONE_FASTER if kept is None else f"Proved, and so in this file: {in_words(setting)}.")
    present = {"num_workers": stages.workers, "prefetch_factor": stages.prefetch_factor, "pin_memory": False}
    for name, value in setting.loader_options.items():
        if value != present[name]:
            comments.append(_LOADER.format(name=name, value=value, now=present[name]))
    if not options:
        comments.append(_NOTHING)
    lines = [f"# {line}\n" for comment in comments for line in wrap(comment, _WIDTH, break_long_words=False)]
    values = [f"  {name}: {json.dumps(value)}\n" for name, value in options.items()]  # JSON is YAML, too
    return "".join([*lines, "echo:\n", *values] if values else [*lines, "{}\n"])


# ---------------------------------------------------------------------- command
# ``python train.py analyze``: the subcommand that `EchoCLI` adds.


class Analyzes:
    """A Trainer that can analyze. ``analyzed_kwargs`` are the options of the Trainers that an analysis makes."""

    analyzed_kwargs: Mapping[str, Any] = {}

    def analyze(
        self,
        model: pl.LightningModule,
        datamodule: pl.LightningDataModule | None = None,
        steps: int | None = None,
        seconds: float = 60.0,
        verify: bool = False,
        json: str | None = None,
        html: str | None = None,
        png: str | None = None,
        apply: str | None = None,
        reads_in_flight: int | str = AUTO_IN_FLIGHT,
        ckpt_path: str | None = None,
        weights_only: bool | None = None,
    ) -> None:
        """Measures where the time of a step goes, and says what would help.

        Args:
            model: The model whose training is analyzed.
            datamodule: Its data.
            steps: Number of steps that are measured in each phase. Default: 100, or as many as the training loader has batches.
            seconds: About how long the analysis may take.
            verify: Whether to prove what is recommended: the best two settings take turns with the training as it is, for about
                as long as the analysis took.
            json: New file that the analysis is saved in. Default: analysis.json in the Trainer's log directory, or
                analysis_1.json and so on where there is one.
            html: New file for a report as a web page.
            png: New file for a report as a picture.
            apply: New file for what is advised (with ``verify``: kept) as options of the group echo, for fit: --config FILE.
            reads_in_flight: Whether threads may run the data set's own code to read ahead: a number. Default: only if it says so.
            ckpt_path: Not used. A configuration that fit has saved may have it.
            weights_only: Not used, for the same reason.

        Raises:
            ValueError: A file exists already, or a number is impossible.
        """
        saved = free_path(output_directory(cast(pl.Trainer, self)), "analysis.json") if json is None else Path(json)
        rank_zero_only(check_new)(json=str(saved), html=html, png=png, apply=apply)  # before minutes of work
        analyzer = StallAnalyzer(model, datamodule, trainer_kwargs=self.analyzed_kwargs, reads_in_flight=reads_in_flight)
        analysis = analyzer.run(steps, seconds)
        _write(saved, analysis.to_json)  # before a setting is tried, which may fail
        if verify:
            try:
                analysis = analyzer.prove(analysis, seconds=seconds)
            except ValueError as error:
                rank_zero_info(f"lightning_echo: nothing was proved: {error}")
        _report(analysis, saved, html, png, apply)


def analyzing(trainer_class: type[pl.Trainer]) -> type[pl.Trainer]:
    """Returns a subclass that can analyze. It has the same name, so configurations and messages do not change."""
    if issubclass(trainer_class, Analyzes):
        return trainer_class
    names = {name: getattr(trainer_class, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(trainer_class.__name__, (Analyzes, trainer_class), names)


def output_directory(trainer: pl.Trainer) -> Path:
    """Returns the directory of the Trainer's first logger, else its ``default_root_dir``. All ranks must call it."""
    directory = trainer.log_dir or trainer.default_root_dir
    # Local files do not fit into a remote storage.
    return Path() if "://" in directory else Path(directory)


def write_new(directory: Path, name: str, save: Callable[[Path], object]) -> Path:
    """Writes a new file in a directory, on the first rank, and returns its path: see `free_path`."""
    path = free_path(directory, name)
    _write(path, save)
    return path


@rank_zero_only
def _write(path: Path, save: Callable[[Path], object]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    save(path)


@rank_zero_only
def _report(analysis: StallAnalysis, json: Path, html: str | None, png: str | None, apply: str | None) -> None:
    print(report(analysis))
    _write(json, analysis.to_json)  # with the tried setting
    written = [str(json)]
    for path, save in (
        (html, partial(save_page, analysis)),
        (png, partial(save_png, analysis)),
        (apply, lambda path: path.write_text(advice_yaml(analysis), encoding="utf-8")),
    ):
        if path is not None:
            _write(Path(path), save)
            written.append(path)
    print(f"\nWritten: {', '.join(written)}")
