r"""A LightningCLI program that knows nothing of echoing, and two ways to echo its data without changing it.

By a callback:

    python plain_cli.py fit --data WavesDataModule --trainer.callbacks+=lightning_echo.EchoCallback \
        --trainer.callbacks.factor=auto
    python plain_cli.py fit --config plain_cli_callback.yaml

By a data module around its own:

    python plain_cli.py fit --data lightning_echo.EchoDataModule --data.factor 2.5 \
        --data.datamodule waves.WavesDataModule --data.datamodule.batch_size 32
    python plain_cli.py fit --config plain_cli_datamodule.yaml
"""

from lightning.pytorch.cli import LightningCLI
from waves import WaveClassifier

if __name__ == "__main__":
    # A job that Slurm starts again (slurm.sh) has the same log folder, with the configuration in it.
    LightningCLI(WaveClassifier, save_config_kwargs={"overwrite": True})
