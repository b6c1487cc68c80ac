"""`EchoCallback`: one line adds echoing to a Trainer."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_echo.attachment import Attachment
from lightning_echo.config import EchoConfig
from lightning_echo.measuring.control import Controller

__all__ = ["EchoCallback"]


class EchoCallback(pl.Callback):
    """Echoes the training data of the data module, or of the model's own ``train_dataloader``.

    Args:
        controller: Decides the factor from epoch to epoch. None: it stays as it is.
        echo: The options of echoing. None: with a controller those of ``EchoConfig()``, and an `EchoLoader` or `EchoDataModule`
            that is in the run is driven as it is; without one the run is left as it is.
        summary: Whether to print a summary at the end of ``fit``.

    Attributes:
        attachment: What puts echoing into the run; its ``echo`` has the loader in use and its factor.

    Raises:
        TypeError: An argument has a wrong type.

    Example:
        >>> from lightning import Trainer
        >>> callback = EchoCallback(echo=EchoConfig(factor=4))
        >>> trainer = Trainer(callbacks=[callback], logger=False, enable_checkpointing=False, accelerator="cpu")
    """

    def __init__(self, controller: Controller | None = None, *, echo: EchoConfig | None = None, summary: bool = True) -> None:
        if controller is not None and not isinstance(controller, Controller):
            raise TypeError(f"controller must be a Controller such as TargetIdle(), or None, got {controller!r}")
        if echo is not None and not isinstance(echo, EchoConfig):
            raise TypeError(
                f"echo must be an EchoConfig or None, got {type(echo).__name__} {echo!r}: EchoConfig(factor=4), "
                "EchoConfig(**options) of a dict, OmegaConf.to_object(config) of a structured config"
            )
        self.controller, self.summary = controller, summary
        self.attachment = Attachment(echo)
        self._echoes = echo is not None or controller is not None

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        _check_alone(trainer)
        if self._echoes:
            self.attachment.attach(trainer, pl_module)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.attachment.check_in_use()

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self.attachment.detach()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self.attachment.detach()

    def state_dict(self) -> dict[str, Any]:
        """The loader's state, which Lightning forgets where the model reads ``trainer.estimated_stepping_batches``."""
        return {"loader": self.attachment.echo.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self.attachment.trainer is not None:  # else this run is not echoed by this callback
            self.attachment.echo.load_state_dict(state_dict["loader"])


def _check_alone(trainer: Any) -> None:
    found = [each for each in trainer.callbacks if isinstance(each, EchoCallback)]
    if len(found) > 1:
        raise MisconfigurationException(
            f"the Trainer has {len(found)} EchoCallbacks, of which only one can echo and decide: keep one, and give it "
            "both echo and controller"
        )
