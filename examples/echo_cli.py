"""A LightningCLI program with a group of options for echoing: `EchoCLI` in place of `LightningCLI`.

    python echo_cli.py fit --echo.factor 4
    python echo_cli.py fit --echo.factor auto
    python echo_cli.py fit --echo.factor demand --echo.max_factor 4
    python echo_cli.py fit --echo.controller TargetIdle --echo.controller.target 0.1
    python echo_cli.py fit --config echo_cli.yaml
    python echo_cli.py fit --config echo_cli.yaml --echo.enabled false
    python echo_cli.py analyze --config echo_cli.yaml --apply advice.yaml
    python echo_cli.py fit --config echo_cli.yaml --config advice.yaml

With none of these options the run is only measured, and the summary says whether echoing would pay. `analyze` says
where the time of a step goes, and what would help; `--apply` writes that as a configuration.
"""

from waves import WaveClassifier, WavesDataModule

from lightning_echo import EchoCLI

if __name__ == "__main__":
    EchoCLI(WaveClassifier, WavesDataModule, parser_kwargs={"parser_mode": "omegaconf"})  # the mode: for ${...} in files
