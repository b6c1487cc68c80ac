"""Echoing in the style of OmegaConf and Hydra: a structured config, overridden from a dot list, and nodes with `_target_`.

    python omegaconf_run.py echo.factor=4 trainer.max_epochs=1

The configuration of a run is saved as config.yaml; `config=PATH` starts from another one than that beside this file.
"""

from importlib import import_module
from pathlib import Path

from lightning import seed_everything
from omegaconf import OmegaConf

from lightning_echo import EchoConfig


def instantiate(node):
    """What `hydra.utils.instantiate` does: nodes with a `_target_` become objects."""
    if isinstance(node, list):
        return [instantiate(each) for each in node]
    if not isinstance(node, dict):
        return node
    values = {name: instantiate(value) for name, value in node.items() if name != "_target_"}
    if "_target_" not in node:
        return values
    module, _, name = node["_target_"].rpartition(".")
    return getattr(import_module(module), name)(**values)


if __name__ == "__main__":
    overrides = OmegaConf.from_cli()
    path = overrides.pop("config", Path(__file__).with_suffix(".yaml"))
    schema = {"echo": OmegaConf.structured(EchoConfig)}  # so that a misspelt or impossible option is found at once
    config = OmegaConf.merge(schema, OmegaConf.load(path), overrides)
    OmegaConf.save(config, "config.yaml")
    seed_everything(config.seed)
    parts = {name: instantiate(node) for name, node in OmegaConf.to_object(config).items()}
    parts["trainer"].fit(parts["model"], datamodule=parts["data"])
