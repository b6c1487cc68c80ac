"""Stage "feed": all cores but one cannot feed this GPU. What cures it?

Each arm trains on the same files with as many workers. Its figure is that of an epoch in steady state: from the end of the last
step of one epoch to the end of the last step of the next, on the device. The epoch is a pass, so that a cache of a share of the
files has that share of hits.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from gpu.data import training_images
from gpu.plan import AUTO, CACHE, CEILING, DECODES, FACTOR, LARGE, PLAIN, PREDICTION
from gpu.setting import Setting, run_parts
from gpu.training import Classifier, DecodesOnDevice, Encoded, EpochClock, Repeated, loader_of, random_batch, trainer_of
from lightning_echo import CacheConfig, EchoCallback, StallAnalyzer

__all__ = ["Feed"]

_EPOCHS, _EPOCHS_OF_AUTO = 2, 4  # auto decides after 10 steps and more, and needs some more to settle


class Feed:
    """All arms.

    Args:
        setting: The run's.
    """

    def __init__(self, setting: Setting) -> None:
        self._setting, self._scale = setting, setting.scale
        # A slow machine has made fewer files.
        self._steps = min(self._scale.steps, len(training_images(setting)) // self._scale.batch_size)
        self._count = self._steps * self._scale.batch_size

    def parts(self) -> dict[str, Callable[[], None]]:
        """By name. Their order stands in ``plan.py``."""
        small, large = self._scale.small, self._scale.large
        return {
            CEILING: partial(self.ceiling, small),
            PREDICTION: self.predict,
            PLAIN: partial(self.fed, small, PLAIN),
            FACTOR: partial(self.fed, small, FACTOR),
            DECODES: self.decoded_on_device,
            AUTO: partial(self.fed, small, AUTO),
            CACHE: partial(self.fed, small, CACHE),
            CEILING + LARGE: partial(self.ceiling, large),
            PLAIN + LARGE: partial(self.fed, large, PLAIN),
            AUTO + LARGE: partial(self.fed, large, AUTO),
        }

    def ceiling(self, network: str) -> None:
        """The batch is on the device: no training is faster."""
        self._measure(network, CEILING, Repeated(random_batch(self._setting), self._steps), EchoCallback(summary=False))

    def fed(self, network: str, arm: str) -> None:
        """From files, without an edit of the training."""
        echo = EchoCallback(**self._options(arm), summary=False)
        is_auto = arm == AUTO
        self._measure(network, arm, self._loader(), echo, epochs=_EPOCHS_OF_AUTO if is_auto else _EPOCHS)

    def decoded_on_device(self) -> None:
        """The sceptic's own remedy: workers read bytes, the device decodes them."""
        files = training_images(self._setting, self._count)
        samples = [files.dataset.samples[index] for index in files.indices]  # type: ignore[attr-defined]
        loader = loader_of(self._setting, Encoded(samples), collate_fn=Encoded.collate)
        model = DecodesOnDevice(self._scale.small, self._scale.resize, self._scale.crop)
        self._measure(self._scale.small, DECODES, loader, EchoCallback(summary=False), model=model)

    def predict(self) -> None:
        """What ``StallAnalyzer`` says before anything of it is measured."""
        precision = {"precision": "bf16-mixed", "accelerator": "gpu" if self._setting.device == "cuda" else "cpu", "devices": 1}
        analyzer = StallAnalyzer(Classifier(self._scale.small), self._loader(), trainer_kwargs=precision)
        analysis = analyzer.run(self._scale.analysis_steps, seconds=self._scale.analysis_seconds)
        print(analysis.verdict.message, flush=True)
        factor = self._ratio()
        echoed = {"factor": factor, "insertion_point": "before_augmentation"}
        for arm, setting in ((PLAIN, {}), (FACTOR, echoed), (CACHE, {"cached_fraction": 0.25, "hold": "loaded"})):
            said = analysis.predict(**setting)  # type: ignore[arg-type]
            self._setting.add(
                "feed",
                network=self._scale.small,
                arm=arm,
                how="predicted",
                workers=self._setting.workers,
                factor=factor if arm == FACTOR else 1.0,
                images_per_second=self._scale.batch_size / said.step_seconds,
                idle_EchoCallback=said.idle_fraction,
                said=analysis.verdict.message if arm == PLAIN else "",
            )

    def _measure(
        self,
        network: str,
        arm: str,
        loader: Any,
        echo: EchoCallback,
        *,
        epochs: int = _EPOCHS,
        model: Classifier | None = None,
    ) -> None:
        """Trains, and writes the row."""
        clock = EpochClock(profiled_epoch=epochs)
        trainer = trainer_of(self._setting, [echo, clock], max_epochs=epochs + 1, limit_train_batches=self._steps)
        trainer.fit(model or Classifier(network), loader)
        report, last = echo.reports[epochs - 1], echo.reports[epochs]
        seconds = clock.ends[epochs - 1] - clock.ends[epochs - 2]
        fresh = report.fresh_examples - echo.reports[epochs - 2].fresh_examples
        delivered = fresh + report.echoed_examples - echo.reports[epochs - 2].echoed_examples
        self._setting.add(
            "feed",
            network=network,
            arm=arm,
            how="measured",
            workers=0 if arm == CEILING else self._setting.workers,
            R=self._ratio() if network == self._scale.small else None,
            factor=report.factor,
            epochs=epochs,
            images_per_second=self._count / seconds,
            fresh_share=fresh / delivered if delivered else None,
            cache_hits=report.cache_hit_fraction,
            idle_EchoCallback=report.idle_fraction,
            idle_in_the_profiled_epoch_EchoCallback=last.idle_fraction,
            no_kernel_in_the_profiled_epoch_torch_profiler=clock.without_kernel,
            first_batch_s=report.first_batch_seconds,
            said=report.message,
        )

    def _options(self, arm: str) -> dict[str, Any]:
        if arm == FACTOR:
            return {"factor": self._ratio()}
        cache = {"cache": self._cache()}
        return {PLAIN: {}, CACHE: cache, AUTO: {"factor": "auto", **cache}}[arm]

    def _ratio(self) -> float:
        return max(round(float(self._setting.noted("R")["R"]), 2), 1.0)

    def _cache(self) -> CacheConfig:
        """Room for a quarter of the decoded images."""
        width, height = self._setting.noted("images")["size"]
        edge = self._scale.resize
        each = 3 * edge * round(edge * width / height) + 512  # its index, label and header
        return CacheConfig(max(self._count // 4 * each, 2**20), hold="loaded")

    def _loader(self) -> Any:
        return loader_of(self._setting, training_images(self._setting, self._count))


if __name__ == "__main__":
    _setting = Setting.of_environment()
    run_parts(_setting, Feed(_setting).parts(), sys.argv[1:])
