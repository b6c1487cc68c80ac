"""Lightning comes as two packages of the same classes, ``lightning`` and ``pytorch_lightning``, that cannot be mixed."""

from __future__ import annotations

from typing import Any

__all__ = ["refuse_other_package"]


def refuse_other_package(name: str, value: Any) -> None:
    """Refuses what is of ``pytorch_lightning``: what we ask of it would fail with a message about something else.

    Args:
        name: Of the argument.
        value: Of any class.

    Raises:
        TypeError: It is, with both ways out.
    """
    if any(base.__module__.split(".")[0] == "pytorch_lightning" for base in type(value).__mro__):
        raise TypeError(
            f"{name} {type(value).__name__} is of the separate package pytorch_lightning, this is an extension of lightning: "
            "change 'import pytorch_lightning as pl' to 'import lightning.pytorch as pl', or pass EchoLoader(loader, factor) to "
            "fit, which works in either package"
        )
