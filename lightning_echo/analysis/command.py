"""``python train.py analyze``: the subcommand that `EchoCLI` adds to ``fit``, ``validate``, ``test`` and ``predict``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities import rank_zero_only

from lightning_echo.analysis.analyzer import StallAnalyzer
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
        steps: int = 100,
        seconds: float = 60.0,
        verify: bool = False,
        json: str = "analysis.json",
        html: str | None = None,
        png: str | None = None,
        ckpt_path: str | None = None,
        weights_only: bool | None = None,
    ) -> None:
        """Measures where the time of a step goes, and says what would help.

        Args:
            model: The model whose training is analyzed.
            datamodule: Its data.
            steps: Number of steps that are measured in each phase.
            seconds: About how long the analysis may take.
            verify: Whether to try the recommended setting, and to compare the prediction with the measurement.
            json: File that the analysis is saved in.
            html: File for a report as a web page.
            png: File for a report as a picture.
            ckpt_path: Not used. A configuration that fit has saved may have it.
            weights_only: Not used, for the same reason.
        """
        analyzer = StallAnalyzer(model, datamodule, trainer_kwargs=self.analyzed_kwargs)
        analysis = analyzer.run(steps, seconds)
        rank_zero_only(analysis.to_json)(json)  # before a setting is tried, which may fail
        if verify:
            try:
                analysis = analyzer.check(analysis)
            except ValueError as error:
                rank_zero_info(f"lightning_echo: the recommended setting was not tried: {error}")
        _report(analysis, json, html, png)


def analyzing(trainer_class: type[pl.Trainer]) -> type[pl.Trainer]:
    """Returns a subclass that can analyze. It has the same name, so that configurations and messages do not change."""
    if issubclass(trainer_class, Analyzes):
        return trainer_class
    names = {name: getattr(trainer_class, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(trainer_class.__name__, (Analyzes, trainer_class), names)


@rank_zero_only
def _report(analysis: StallAnalysis, json: str, html: str | None, png: str | None) -> None:
    print(report(analysis))
    analysis.to_json(json)
    if html is not None:
        save_page(analysis, html)
    if png is not None:
        save_png(analysis, png)
    written = [path for path in (json, html, png) if path is not None]
    print(f"\nWritten: {', '.join(written)}")
