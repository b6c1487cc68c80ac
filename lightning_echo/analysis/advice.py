"""The advice of an analysis as a file for ``fit --config``. Options of `EchoCLI` are set, and the rest is a comment."""

from __future__ import annotations

import json
from textwrap import wrap

from lightning_echo.analysis.result import StallAnalysis

__all__ = ["advice_yaml"]

_WIDTH = 118
_HOW = "What `analyze` advises. Give this file after your own: fit --config config.yaml --config THIS_FILE"
_WORKERS = "Set num_workers={workers} where your program sets it: only you know the name of that option"
_NOTHING = "There is nothing to set in the group echo: this file changes nothing."


def advice_yaml(analysis: StallAnalysis) -> str:
    """Returns the advice as YAML, for a program with an `EchoCLI`. It is used beside the program's own configuration.

    It contains the options `TrainingSetting.options`, in the group ``echo``. The message of the verdict is a comment.
    ``num_workers`` is a comment, too, since its option belongs to the program. If there is no option to set, the file changes
    nothing.
    """
    setting = analysis.verdict.setting
    comments = [_HOW, analysis.verdict.message]
    if setting.workers not in (None, analysis.stages.workers):
        comments.append(_WORKERS.format(workers=setting.workers) + f" (now {analysis.stages.workers}).")
    if not setting.options:
        comments.append(_NOTHING)
    lines = [f"# {line}\n" for comment in comments for line in wrap(comment, _WIDTH, break_long_words=False)]
    values = [f"  {name}: {json.dumps(value)}\n" for name, value in setting.options.items()]  # JSON is YAML, too
    return "".join([*lines, "echo:\n", *values] if values else [*lines, "{}\n"])
