"""What a run will amount to, in a line: said when it begins, since the factor changes what an epoch means."""

from __future__ import annotations

from typing import Any

from lightning_echo.echoing.loader import EchoLoader
from lightning_echo.several import Echoed

__all__ = ["forecast"]


def forecast(trainer: Any, echoed: Echoed) -> str:
    """Epochs, steps and passes over the data, as far as they are known; empty: nothing of it is.

    Args:
        trainer: Knows the epochs, and where it stops one.
        echoed: What it trains on.
    """
    if not isinstance(echoed, EchoLoader):
        beside = f"; left as they are: {', '.join(echoed.beside)}" if echoed.beside else ""
        return f"loaders that are echoed: {', '.join(echoed)}{beside}"
    factor = echoed.factor
    if not echoed.has_length:
        return f"epochs end where passes over the data end, of as many steps x factor {factor:g}"
    steps, limit, epochs = len(echoed), trainer.limit_train_batches, trainer.max_epochs
    steps = int(steps * limit) if isinstance(limit, float) else min(steps, limit)
    if epochs is None or epochs < 0 or not steps:
        return ""
    passes = epochs * steps / echoed.pass_batches / factor
    what = "pass" if f"{passes:.3g}" == "1" else "passes"
    return f"{epochs:,} epochs x {steps:,} steps = {passes:.3g} {what} over the data at factor {factor:g}"
