"""The `EchoCLI` of programs that import ``pytorch_lightning``. Everything else in this package takes either of the two."""

from typing import TYPE_CHECKING

from lightning_echo.cli import Echoes

if TYPE_CHECKING:  # for a type checker, the same methods of the two packages do not fit together
    from lightning.pytorch.cli import LightningCLI
else:
    from pytorch_lightning.cli import LightningCLI


class EchoCLI(Echoes, LightningCLI):
    """The same as `lightning_echo.EchoCLI`, for ``pytorch_lightning``.

    Example:
        >>> from unittest.mock import patch
        >>> from pytorch_lightning.demos.boring_classes import BoringModel
        >>> started = ["train.py", "--echo.factor=4", "--trainer.accelerator=cpu", "--trainer.logger=false"]
        >>> with patch("sys.argv", started):  # as from the command line
        ...     cli = EchoCLI(BoringModel, run=False, seed_everything_default=False)
        >>> cli.config.echo.factor, type(cli.trainer).__module__
        (4, 'pytorch_lightning.trainer.trainer')
    """
