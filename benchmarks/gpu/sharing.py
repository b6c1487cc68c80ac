"""Stage "sharing": several trainings on one card, at several learning rates. Who feeds them?

As a stage it is the conductor: it starts the trainings of a way to share, each a process of its own, waits until all of them
are warm, and measures them for a while. ``python -m gpu.sharing training`` and ``... producer`` are those processes. A training
counts its images in a file that all can see; what it got of each pass it writes at each pass's end.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from torchvision.datasets import ImageFolder

from gpu.data import training_images
from gpu.images import CLASSES
from gpu.plan import ALONE, SHARED, TENSORSOCKET
from gpu.setting import Setting, run_parts
from gpu.training import Classifier, loader_of, trainer_of
from lightning_echo import EchoCallback

__all__ = ["conduct", "core_seconds", "of_passes"]

_RATES = (0.003, 0.01, 0.03, 0.1)
_WARM_STEPS = 8
_START_SECONDS, _QUIET_SECONDS, _LEAVE_SECONDS = 35.0, 12.0, 8.0
_TOGETHER = 2  # batches that TensorSocket collects before it hands them over: fewer of a pass are lost than with its 8
_LOOPBACK = "tcp://127.0.0.1"
_WINDOW = "2GiB"

_asked_to_end: list[str] = []
_BEGAN = time.monotonic()


class Trouble(Exception):
    """A process of the run has died or hangs: what the row says."""


# ---------------------------------------------------------------------- the conductor


def conduct(setting: Setting, how: str) -> None:
    """Runs the trainings of one way, and writes its row."""
    folder = setting.scratch / f"sharing-{how.split()[0]}"
    folder.mkdir(mode=0o700)  # readers refuse a folder that others can open
    count = setting.scale.trainings
    delivered = _board(folder, count, "w+")
    said, rates, cores, memory, total = "", np.zeros(count), None, None, None
    with ExitStack() as stack:
        processes: dict[str, subprocess.Popen[bytes]] = {}
        stack.callback(lambda: _end(processes.values()))
        ports = _free_ports(4) if how == TENSORSOCKET else []
        if ports:
            processes["producer"] = _start(folder, "producer", how, 0, ports)
        for number in range(count):
            processes[f"training {number}"] = _start(folder, "training", how, number, ports)
        try:
            warm = min(_WARM_STEPS, setting.scale.shared_steps) * setting.scale.batch_size
            _wait_until(lambda: bool((delivered >= warm).all()), processes, delivered)
            _tell("warm")
            before, cores_before, began = delivered.copy(), core_seconds(), time.monotonic()
            _wait_until(lambda: time.monotonic() - began > setting.scale.window_seconds, processes, delivered)
            seconds, got = time.monotonic() - began, delivered - before
            cores, total = 1e3 * (core_seconds() - cores_before) / float(got.sum()), _card_memory()
            rates = got / seconds
            _tell("measured")
            (folder / "stop").touch()
            _wait_for_ends(processes, folder)
        except Trouble as trouble:
            said = str(trouble)
    found = [json.loads(file.read_text()) for file in sorted(folder.glob("training-*.json"))]
    passes = [each for training in found for each in training["passes"]]
    images = setting.scale.shared_steps * setting.scale.batch_size
    lost, twice = of_passes(passes, images)
    memory = [training["device_memory_bytes"] / 2**20 for training in found]
    setting.add(
        "sharing",
        how=how,
        trainings=count,
        workers_in_all=setting.workers,
        images_per_second_in_all=float(rates.sum()) or None,
        slowest=float(rates.min()) or None,
        core_seconds_per_1000_images=cores,
        device_memory_of_a_training_MiB=sum(memory) / len(memory) if memory else None,
        device_memory_in_all_MiB=total,
        passes=len(passes),
        images_a_pass=images,
        lost=lost,
        twice=twice,
        said=said,
    )
    if _asked_to_end:
        sys.exit(_asked_to_end[0])


def of_passes(passes: Iterable[tuple[int, int]], images: int) -> tuple[int | None, int | None]:
    """Returns how many images a training did not get in its worst pass, and how many it got twice; None without a pass.

    Args:
        passes: Delivered images and different images of each.
        images: Of a pass.

    Example:
        >>> of_passes([(10, 10), (9, 8)], images=10)
        (2, 1)
    """
    found = list(passes)
    if not found:
        return None, None
    return max(images - different for _, different in found), max(got - different for got, different in found)


def core_seconds() -> float:
    """Returns what all cores of the machine have worked, in seconds."""
    fields = Path("/proc/stat").read_text().splitlines()[0].split()[1:]
    user, nice, system, _, _, interrupts, soft = map(int, fields[:7])
    return (user + nice + system + interrupts + soft) / os.sysconf("SC_CLK_TCK")


def _wait_until(is_over: Any, processes: dict[str, subprocess.Popen[bytes]], delivered: np.ndarray) -> None:
    """Waits, and raises `Trouble` if a process ends or no image arrives."""
    changed, before = time.monotonic(), -1
    while not is_over():
        time.sleep(0.02)
        _end_if_asked()
        for name, process in processes.items():
            if process.poll() is not None:
                raise Trouble(f"{name} died with status {process.returncode}: see log.txt")
        now, total = time.monotonic(), int(delivered.sum())
        if total != before:
            changed, before = now, total
        patience = _QUIET_SECONDS if (delivered > 0).all() else _START_SECONDS
        if now - changed > patience:
            raise Trouble(f"hung after {int(delivered.min())} images")


def _wait_for_ends(processes: dict[str, subprocess.Popen[bytes]], folder: Path) -> None:
    """Lets trainings end their pass; whoever has not ended by then has written what it got of the passes before."""
    end = time.monotonic() + _LEAVE_SECONDS
    for name, process in processes.items():
        while name != "producer" and process.poll() is None and time.monotonic() < end:
            time.sleep(0.05)
            _end_if_asked()


def _end_if_asked() -> None:
    """What is known by then becomes a row all the same."""
    if _asked_to_end:
        raise Trouble(_asked_to_end[0])


def _tell(moment: str) -> None:
    print(f"  {time.monotonic() - _BEGAN:.1f} s: {moment}", flush=True)


def _start(folder: Path, role: str, how: str, number: int, ports: list[int]) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "gpu.sharing", role, how, str(number), str(folder), json.dumps(ports)]
    environment = {**os.environ, "LIGHTNING_ECHO_SHARED": str(folder)}
    return subprocess.Popen(command, env=environment, start_new_session=True)


def _end(processes: Iterable[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)  # its workers with it
            process.wait()


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [each.getsockname()[1] for each in sockets]


def _card_memory() -> float | None:
    """MiB in use on the card, whoever uses it. The driver is asked, so that this process takes nothing of the card."""
    if not torch.cuda.is_available():
        return None
    asked = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    try:
        return float(subprocess.run(asked, capture_output=True, text=True, timeout=10, check=True).stdout.split()[0])
    except (OSError, ValueError, IndexError, subprocess.SubprocessError):
        return None  # a figure less


def _board(folder: Path, count: int, mode: str) -> np.ndarray:
    """Images that each training has had so far."""
    return np.memmap(folder / "delivered", np.int64, mode, shape=(count,))  # type: ignore[call-overload,no-any-return]


# ---------------------------------------------------------------------- the processes of a run


class Numbered(Classifier):
    """Labels are numbers of files, so that it is known which of them arrived.

    Args:
        network: As of `Classifier`.
        learning_rate: As of `Classifier`.
        labels: By number, (N,), int64.
    """

    def __init__(self, network: str, learning_rate: float, labels: Tensor) -> None:
        super().__init__(network, learning_rate)
        self.register_buffer("labels", labels)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        images, numbers = batch
        return super().training_step([images, self.labels[numbers]], batch_idx)  # type: ignore[index]


class Counts(pl.Callback):
    """Counts images and passes, and ends the training when the conductor says so.

    Args:
        folder: Of the run.
        number: Of the training.
        trainings: How many there are.
        is_alone: Whether the training may end in the middle of a pass.
    """

    def __init__(self, folder: Path, number: int, trainings: int, is_alone: bool) -> None:
        self._folder, self._number, self._is_alone = folder, number, is_alone
        self._delivered = _board(folder, trainings, "r+")
        self._numbers: list[Tensor] = []  # of this pass
        self._passes: list[tuple[int, int]] = []

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int) -> None:
        self._numbers.append(batch[1].clone())

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        self._delivered[self._number] += len(self._numbers[-1])
        if self._is_alone and self._is_over():
            self._write()
            trainer.should_stop = True

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.should_stop:
            return
        numbers = torch.cat(self._numbers).tolist() if self._numbers else []
        self._passes.append((len(numbers), len(set(numbers))))
        self._numbers = []
        self._write()
        trainer.should_stop = self._is_over()

    def _is_over(self) -> bool:
        return (self._folder / "stop").exists()

    def _write(self) -> None:
        memory = torch.cuda.max_memory_reserved() if torch.cuda.is_available() else 0
        written = self._folder / f"training-{self._number}.written"
        written.write_text(json.dumps({"passes": self._passes, "device_memory_bytes": memory}))
        written.rename(written.with_suffix(".json"))  # nobody sees a part of it


class Unsized:
    """What TensorSocket delivers, without a length: it delivers less than it says, and Lightning would wait for the rest.

    Args:
        consumer: TensorSocket's.
    """

    def __init__(self, consumer: Any) -> None:
        self._consumer = consumer

    def __iter__(self) -> Iterator[Any]:
        yield from self._consumer


def numbered_images(setting: Setting) -> tuple[ImageFolder, Tensor]:
    """The files of a pass, their numbers as labels; and the true labels, by number."""
    subset: Any = training_images(setting, setting.scale.shared_steps * setting.scale.batch_size)
    folder: ImageFolder = subset.dataset
    chosen = [folder.samples[index] for index in subset.indices]
    folder.samples = folder.imgs = [(path, number) for number, (path, _) in enumerate(chosen)]
    folder.targets = list(range(len(chosen)))
    return folder, torch.tensor([label for _, label in chosen])


def training(setting: Setting, how: str, number: int, folder: Path, ports: list[int]) -> None:
    """One of the trainings."""
    count, scale = setting.scale.trainings, setting.scale
    data, labels = numbered_images(setting)
    assert int(labels.max()) < len(CLASSES)
    model = Numbered(scale.small, _RATES[number % len(_RATES)], labels)
    callbacks: list[pl.Callback] = [Counts(folder, number, count, how == ALONE)]
    loader: Any
    if how == TENSORSOCKET:
        loader = Unsized(_consumer(ports, scale.batch_size))
    elif how == SHARED:
        share = {"name": "gpu", "wait_for": count, "linger_seconds": 0, "window": _WINDOW, "workers": "starter"}
        loader = loader_of(setting, data)
        callbacks.insert(0, EchoCallback(share=share, seed=0, summary=False))
    else:
        mine = max((setting.workers + number) // count, 1)  # all workers, dealt out
        loader = loader_of(setting, data, num_workers=mine)
    trainer_of(setting, callbacks, max_epochs=1_000_000).fit(model, loader)
    if how == TENSORSOCKET:
        sys.stdout.flush()
        os._exit(0)  # its threads wait for the producer, and would abort the interpreter's end


def _consumer(ports: list[int], batch_size: int) -> Any:
    module = import_module("tensorsocket.consumer")
    module.LOCALHOST = _LOOPBACK  # it has no option for the address
    port, acknowledged, *hearts = ports
    return module.TensorConsumer(port=port, ack_port=acknowledged, heart_ports=tuple(hearts), batch_size=batch_size)


def producer(setting: Setting, ports: list[int]) -> None:
    """The process that reads for TensorSocket. It works until it is ended."""
    module = import_module("tensorsocket.producer")
    module.LOCALHOST = _LOOPBACK
    port, acknowledged, *hearts = ports
    data, _ = numbered_images(setting)
    loader: DataLoader[Any] = loader_of(setting, data)
    made = module.TensorProducer(
        loader, port=port, ack_port=acknowledged, heart_ports=tuple(hearts), producer_batch_size=_TOGETHER
    )
    while len(made.hb.consumers) < setting.scale.trainings:  # nobody comes too late
        time.sleep(0.01)
    while True:
        for _ in made:
            pass


def _main(arguments: list[str]) -> None:
    setting = Setting.of_environment()
    if arguments[0] == "training":
        how, number, folder, ports = arguments[1:]
        training(setting, how, int(number), Path(folder), json.loads(ports))
    elif arguments[0] == "producer":
        producer(setting, json.loads(arguments[-1]))
    else:
        # The driver ends a stage that takes too long. The trainings have sessions of their own, and must not outlive it.
        # The handler only notes it: an exception inside `Popen` would lose the process that has just been started.
        signal.signal(signal.SIGTERM, lambda *_: _asked_to_end.append("ended by the driver"))
        ways = {how: partial(conduct, setting, how) for how in (SHARED, TENSORSOCKET, ALONE)}
        run_parts(setting, ways, arguments)


if __name__ == "__main__":
    _main(sys.argv[1:])
