"""What a `StallAnalyzer` refuses at once, and the copy of the model that it trains. Whole analyses: tests/integration."""

import pytest
from analyses import ANALYSIS
from lightning.pytorch import Callback
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_echo import StallAnalyzer
from lightning_echo.analysis.analyzer import _copy_of


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 3}, "steps must be >= 4, got 3"),
        ({"seconds": 0}, "seconds must be > 0, got 0"),
        ({"seconds": float("nan")}, "seconds must be > 0, got nan"),
    ],
)
def test_impossible_numbers_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        StallAnalyzer(BoringModel()).run(**options)


def test_a_setting_is_tried_only_after_an_analysis():
    with pytest.raises(RuntimeError, match=r"nothing was analyzed yet: call run\(\) first"):
        StallAnalyzer(BoringModel()).check(ANALYSIS, workers=2)


def test_the_copy_of_a_model_ends_silently_and_brings_no_callbacks():
    class Ends(BoringModel):
        def __init__(self):
            super().__init__()
            self.ended = []

        def on_train_epoch_end(self):
            self.ended.append("epoch")

        def on_train_end(self):
            self.ended.append("training")

        def on_fit_end(self):
            self.ended.append("fit")

        def configure_callbacks(self):
            return [Callback()]

    model = Ends()
    copied = _copy_of(model)
    for hook in ("on_train_epoch_end", "on_train_end", "on_fit_end"):
        getattr(copied, hook)()
    assert (model.ended, copied.ended, copied.configure_callbacks()) == ([], [], [])
    model.on_train_end()
    assert (model.ended, len(model.configure_callbacks())) == (["training"], 1), "the user's model is left as it is"
    assert copied.layer.weight.data_ptr() != model.layer.weight.data_ptr()
