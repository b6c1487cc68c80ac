"""``python train.py analyze``: the subcommand that `EchoCLI` adds to ``fit``, ``validate``, ``test`` and ``predict``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, cast

import lightning.pytorch as pl
from lightning.pytorch.utilities import rank_zero_only

from lightning_echo.analysis.advice import advice_yaml
from lightning_echo.analysis.analyzer import StallAnalyzer
from lightning_echo.analysis.outputs import check_new, free_path
from lightning_echo.analysis.report.page import save_page
from lightning_echo.analysis.report.plot import save_png
from lightning_echo.analysis.report.text import report
from lightning_echo.analysis.result import StallAnalysis
from lightning_echo.training.rank_zero import rank_zero_info

__all__ = ["Analyzes", "analyzing"]


class Analyzes:
    """A Trainer that can analyze.

    Attributes:
        analyzed_kwargs: Options of the Trainers that an analysis makes.
    """

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
        ckpt_path: str | None = None,
        weights_only: bool | None = None,
    ) -> None:
        """Measures where the time of a step goes, and says what would help.

        Args:
            model: The model whose training is analyzed.
            datamodule: Its data.
            steps: Number of steps that are measured in each phase. Default: 100, or as many as the training loader has batches.
            seconds: About how long the analysis may take.
            verify: Whether to try the recommended setting, and to compare the prediction with the measurement.
            json: New file that the analysis is saved in. Default: analysis.json in the Trainer's log directory, or
                analysis_1.json and so on where there is one.
            html: New file for a report as a web page.
            png: New file for a report as a picture.
            apply: New file for what is advised as options of the group echo, to be given to fit: --config FILE.
            ckpt_path: Not used. A configuration that fit has saved may have it.
            weights_only: Not used, for the same reason.

        Raises:
            ValueError: A file exists already, or a number is impossible.
        """
        saved = free_path(_log_directory(cast(pl.Trainer, self)), "analysis.json") if json is None else Path(json)
        rank_zero_only(check_new)(json=str(saved), html=html, png=png, apply=apply)  # before minutes of work
        analyzer = StallAnalyzer(model, datamodule, trainer_kwargs=self.analyzed_kwargs)
        analysis = analyzer.run(steps, seconds)
        _write(saved, analysis.to_json)  # before a setting is tried, which may fail
        if verify:
            try:
                analysis = analyzer.check(analysis)
            except ValueError as error:
                rank_zero_info(f"lightning_echo: the recommended setting was not tried: {error}")
        _report(analysis, saved, html, png, apply)


def analyzing(trainer_class: type[pl.Trainer]) -> type[pl.Trainer]:
    """Returns a subclass that can analyze. It has the same name, so that configurations and messages do not change."""
    if issubclass(trainer_class, Analyzes):
        return trainer_class
    names = {name: getattr(trainer_class, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(trainer_class.__name__, (Analyzes, trainer_class), names)


def _log_directory(trainer: pl.Trainer) -> Path:
    """Returns the directory of the Trainer's first logger, else its ``default_root_dir``.

    A directory in a remote storage is no place for a local file: then it is the working directory. All ranks must call it.
    """
    directory = trainer.log_dir or trainer.default_root_dir
    return Path() if "://" in directory else Path(directory)


@rank_zero_only
def _write(path: Path, save: Callable[[Path], None]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    save(path)


@rank_zero_only
def _report(analysis: StallAnalysis, json: Path, html: str | None, png: str | None, apply: str | None) -> None:
    print(report(analysis))
    _write(json, analysis.to_json)  # with what was tried
    written = [str(json)]
    for path, save in (
        (html, partial(save_page, analysis)),
        (png, partial(save_png, analysis)),
        (apply, partial(_save_advice, analysis)),
    ):
        if path is not None:
            _write(Path(path), save)
            written.append(path)
    print(f"\nWritten: {', '.join(written)}")


def _save_advice(analysis: StallAnalysis, path: str | Path) -> None:
    Path(path).write_text(advice_yaml(analysis), encoding="utf-8")
