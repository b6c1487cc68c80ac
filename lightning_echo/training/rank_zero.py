"""Lines for the user on rank 0, through the one logger of the package. (Lightning's own function uses Lightning's logger.)"""

from lightning.pytorch.utilities import rank_zero_only

from lightning_echo.log import LOGGER

__all__ = ["rank_zero_info"]


@rank_zero_only
def rank_zero_info(message: str) -> None:
    """Logs a line on rank 0.

    Args:
        message: The line, beginning with ``lightning_echo: ``.

    Example:
        >>> rank_zero_info("lightning_echo: echoing is off")
    """
    LOGGER.info("%s", message, stacklevel=3)  # past this function and the decorator, so that the line names the caller
