"""``python train.py analyze``: what `EchoCLI` gives its Trainer beside ``fit``, ``validate``, ``test`` and ``predict``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities import rank_zero_info, rank_zero_only

from lightning_echo.analysis.analyzer import StallAnalyzer
from lightning_echo.analysis.report.page import save_page
from lightning_echo.analysis.report.plot import save_png
from lightning_echo.analysis.report.text import report
from lightning_echo.analysis.result import StallAnalysis

__all__ = ["Analyzes", "analyzing"]


class Analyzes:
    """A Trainer that can analyze.

    Attributes:
        analyzed_kwargs: What Trainers of the analysis are made with.
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
            model: Whose training is analyzed.
            datamodule: Its data.
            steps: Steps that are measured in each phase.
            seconds: About how long it may take in all.
            verify: Whether the recommended setting is tried, and what was predicted compared with what is measured.
            json: File that the analysis is saved in.
            html: File for a report as a web page.
            png: File for a report as a picture.
            ckpt_path: Not used; there, so that a configuration saved by fit is accepted.
            weights_only: Not used either.
        """
        analyzer = StallAnalyzer(model, datamodule, trainer_kwargs=self.analyzed_kwargs)
        analysis = analyzer.run(steps, seconds)
        rank_zero_only(analysis.to_json)(json)  # whatever happens when something is tried
        if verify:
            try:
                analysis = analyzer.check(analysis)
            except ValueError as error:
                rank_zero_info(f"lightning_echo: the recommended setting was not tried: {error}")
        _report(analysis, json, html, png)


def analyzing(trainer_class: type[pl.Trainer]) -> type[pl.Trainer]:
    """The same class, able to analyze; called the same, so that configurations and messages do not change."""
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
