"""Objects of ``pytorch_lightning`` are refused by where their classes come from."""

import pytest

from lightning_echo.training.other_package import refuse_other_package


def of(module, *bases):
    return type("Trainer", bases, {"__module__": module})()


@pytest.mark.parametrize("module", ["pytorch_lightning", "pytorch_lightning.trainer.trainer"])
@pytest.mark.parametrize("is_subclass", [False, True])
def test_what_is_of_it_is_refused_with_both_ways_out(module, is_subclass):
    value = of(module)
    if is_subclass:
        value = of("users.code", type(value))
    message = (
        "^trainer Trainer is of the separate package pytorch_lightning, .* 'import lightning.pytorch as pl', or pass EchoLoader"
    )
    with pytest.raises(TypeError, match=message):
        refuse_other_package("trainer", value)


@pytest.mark.parametrize("value", [None, 3, of("lightning.pytorch.trainer.trainer"), of("pytorch_lightning_bolts.trainer")])
def test_anything_else_is_let_through(value):
    assert refuse_other_package("trainer", value) is None
