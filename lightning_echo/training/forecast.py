"""What a run will amount to, in a line: said when it begins, since the factor changes what an epoch means.

While the buffer fills, more of each batch is fresh. In a short run that counts, and is said.
"""

from __future__ import annotations

from typing import Any

from lightning_echo.loading.loader import EchoLoader
from lightning_echo.training.several import Echoed

__all__ = ["forecast"]

_SHORT_STEPS = 2000  # in longer runs it makes no difference, and planning them takes time
_NOTICED = 1.03


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
    said = f"{epochs:,} epochs x {steps:,} steps = {passes:.3g} {what} over the data at factor {factor:g}"
    planned = echoed.passes_in(epochs * steps) if echoed.is_at_start and epochs * steps <= _SHORT_STEPS else None
    if planned is not None and planned > _NOTICED * passes:
        said += f", {planned:.3g} with the fresh examples that fill the buffer first"
    return said
