"""The verdict in words: do nothing, or apply the remedies that are enough (remedies.py), and what an echo factor costs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum

from lightning_echo.analysis.caches import possible_holds
from lightning_echo.analysis.measured import MeasuredStages
from lightning_echo.analysis.predict import TrainingSetting, predict
from lightning_echo.analysis.remedies import Remedy, feeds, most_workers, remedies
from lightning_echo.measuring.target_idle import LARGE_FACTOR, TARGET
from lightning_echo.measuring.words import busy, fewer_fresh, no_workers, percent

__all__ = ["Verdict", "VerdictKind", "judge"]

_EXPLAINED = 1.15  # a step is explained if it takes at most this many times as long as predicted
_UNCUT = (
    "The data set cannot be cut before its augmentation, so that a cache can hold its examples only whole (hold='whole'), if it "
    "returns the same each time"
)


class VerdictKind(Enum):
    """What kind of advice it is, for programs. `Verdict.message` tells it to people."""

    not_starved = "not_starved"  # do nothing
    more_workers = "more_workers"  # more workers are enough
    cache = "cache"  # a part of the data set in memory is enough
    cache_and_echo = "cache_and_echo"  # memory does not hold enough; the echo factor is for what is left
    transform = "transform"  # one transform alone starves the accelerator
    echo = "echo"  # no cheaper remedy is enough
    not_enough = "not_enough"  # no remedy is enough, workers fail, or the predictions do not explain the measured steps


@dataclass(frozen=True)
class Verdict:
    """What to do.

    Attributes:
        kind: What kind of advice it is, for programs.
        message: The advice, for people.
        setting: The advised setting. It is the measured one if nothing is to be changed. Its ``options`` are those of an
            `EchoConfig`, and its ``line`` is the callback to paste.
        remedies: The remedies that help, in their order. Each contains those before it. Empty if none was looked for.
    """

    kind: VerdictKind
    message: str
    setting: TrainingSetting
    remedies: tuple[Remedy, ...] = ()


def judge(stages: MeasuredStages, step_seconds: float, transforms: Mapping[str, float], target: float = TARGET) -> Verdict:
    """Returns the cheapest setting that feeds the accelerator: its steps are hardly longer than a step with everything ready.

    Args:
        stages: What was measured.
        step_seconds: Time per step of the real run.
        transforms: Seconds per example of each transform, by name.
        target: Share of the time that the accelerator may wait.
    """
    idle = max(0.0, 1 - stages.step.median / step_seconds)
    if idle <= target:
        return Verdict(VerdictKind.not_starved, f"Do nothing: {busy(idle)}.", TrainingSetting())
    if feeds(stages, TrainingSetting(), target):
        return _not_by_waiting(stages, step_seconds, idle)
    if not stages.can_have_workers:
        return _by_mending_workers(idle)
    found = tuple(remedies(stages, target))
    if found and found[-1].is_enough:
        return replace(_by_remedy(stages, found[-1], transforms, idle), remedies=found)
    message = f"Nothing that was tried is enough: {busy(idle, only=True)}. What helps is a faster source."
    return Verdict(VerdictKind.not_enough, message, TrainingSetting(), found)


def _by_remedy(stages: MeasuredStages, last: Remedy, transforms: Mapping[str, float], idle: float) -> Verdict:
    """Returns the advice to apply all remedies up to the one that is enough."""
    setting = last.setting
    if last.name == "workers" and not stages.workers:
        return Verdict(VerdictKind.more_workers, no_workers(setting.workers or 1, idle), setting)
    gain = f"{busy(idle, only=True)}, and would be {percent(1 - predict(stages, setting).idle_fraction)}"
    how = _how(stages, setting)
    if last.name != "echo":
        kind = VerdictKind.cache if last.name == "cache" else VerdictKind.more_workers
        return Verdict(kind, f"{_begun(how)}: {gain}.{_about_cache(stages, setting)}", setting)
    price = fewer_fresh(setting.factor)
    if setting.factor > LARGE_FACTOR:
        price += "; so large a factor seldom pays in learning: try a faster source first"
    if (transform := _starving_transform(stages, transforms)) is not None:
        moved = "Move it to the device, for whole batches at once"
        message = f"{transform} alone starves the accelerator. {moved}, or {how}: {gain}; {price}."
        return Verdict(VerdictKind.transform, message, setting)
    kind = VerdictKind.cache_and_echo if setting.hold else VerdictKind.echo
    message = f"{_begun(how)}: {gain}; {price}. {_nothing_cheaper(stages, setting)}.{_about_cache(stages, setting)}"
    return Verdict(kind, message, setting)


def _not_by_waiting(stages: MeasuredStages, step_seconds: float, idle: float) -> Verdict:
    """Returns the verdict for a loader that is fast enough while the accelerator waits nevertheless."""
    predicted = predict(stages, TrainingSetting()).step_seconds
    if step_seconds <= _EXPLAINED * predicted:
        message = f"Do nothing: {busy(idle)}, and the rest is spent on taking and copying batches, not on waiting for them."
        return Verdict(VerdictKind.not_starved, message, TrainingSetting())
    message = (
        f"No advice: {busy(idle, only=True)}, but the stages by themselves explain {1e3 * predicted:.3g} of "
        f"{1e3 * step_seconds:.3g} ms. Something else takes time; analyze again on a quiet machine."
    )
    return Verdict(VerdictKind.not_enough, message, TrainingSetting())


def _by_mending_workers(idle: float) -> Verdict:
    """Returns the verdict for a data set that fails in workers: this must be mended first."""
    message = (
        "Make the data set work in worker processes first (the notes say how it fails), then analyze again: "
        f"{busy(idle, only=True)}, since without workers loading and training take turns."
    )
    return Verdict(VerdictKind.not_enough, message, TrainingSetting())


def _how(stages: MeasuredStages, setting: TrainingSetting) -> str:
    """Returns what a setting changes, as a request in the order of the remedies."""
    parts = []
    if setting.workers not in (None, stages.workers):
        parts.append(f"set num_workers to {setting.workers}")
    if setting.cached_fraction:
        where = "memory" if setting.hold is None else f"a cache with hold='{setting.hold}'"
        size = f" and size='{setting.cache_size}'" if setting.cache_size else ""
        parts.append(f"keep {percent(setting.cached_fraction)} of the data set in {where}{size}")
    if setting.factor > 1:
        left = " for what is left" if setting.cached_fraction else ""
        parts.append(f"echo{left} at insertion_point='{setting.insertion_point}' with factor {setting.factor:.3g}")
    return ", ".join(parts[:-1]) + (" and " if len(parts) > 1 else "") + parts[-1]


def _begun(sentence: str) -> str:
    return sentence[0].upper() + sentence[1:]


def _about_cache(stages: MeasuredStages, setting: TrainingSetting) -> str:
    """Returns what the user should know of the cache, as a sentence; empty if there is nothing to add."""
    if setting.hold and setting.cache_size is None:
        return " The size of that cache is not known from this analysis: analyze again."
    if setting.cached_fraction and setting.hold is None:
        return f" {_UNCUT}."
    return ""


def _starving_transform(stages: MeasuredStages, transforms: Mapping[str, float]) -> str | None:
    """Returns the transform that alone takes longer than a step, even with one worker for each core; None if there is none."""
    if not transforms:
        return None
    name = max(transforms, key=lambda each: transforms[each])
    return name if transforms[name] * stages.batch_size / max(most_workers(stages), 1) > stages.step.median else None


def _nothing_cheaper(stages: MeasuredStages, setting: TrainingSetting) -> str:
    """Returns why the cheaper remedies are not enough, in words."""
    if setting.hold:
        is_all = setting.cached_fraction == 1
        return "The rest takes too long even then" if is_all else "Memory does not hold more"
    limits = {
        "cores": f"The {stages.cores} cores are the limit, so that neither",
        "storage": "The storage is the limit, and neither",
    }
    limit = predict(stages, TrainingSetting(most_workers(stages))).limit
    why = f"{limits.get(limit, 'Neither')} more workers nor a cache are enough"
    return why if possible_holds(stages) or not stages.read.median else f"{why}. {_UNCUT}"
