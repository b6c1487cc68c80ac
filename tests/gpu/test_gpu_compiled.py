"""Steps that are compiled, or captured as a CUDA graph, on batches that are reused on the device: edits in place are seen."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
from collections.abc import Callable
from typing import Any

import pytest
import torch
from gpu_runs import DEVICE, ON_GPU, Moving, echoing, loader_of, trainer, warns_of_edits

STEPS, BATCH_SIZE, WIDTH, FACTOR = 24, 4, 12_289, 4
EXAMPLES = torch.arange(float(STEPS * BATCH_SIZE))[:, None].expand(-1, WIDTH)
Step = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def edits(examples: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """A loss of a batch that was doubled in place."""
    examples.mul_(2)
    return (examples[:, :3] * weight).mean()


def edits_a_part(examples: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """A loss of a batch of which a view was edited, without autograd."""
    with torch.no_grad():
        examples[1:, : WIDTH // 2].add_(1000)
    return (examples[:, :3] * weight).mean()


def edits_nothing(examples: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return ((examples * 2)[:, :3] * weight).mean()


@pytest.fixture(scope="module")
def compiler() -> None:
    """Skips where torch.compile cannot work."""
    names = [os.environ.get("CXX", "c++"), "g++", "gcc", "cc", "clang"]
    if not any(shutil.which(name) for name in names):
        pytest.skip("torch.compile needs a compiler of C, and there is none")
    if ON_GPU and importlib.util.find_spec("triton") is None:
        pytest.skip("torch.compile needs triton, which is not installed")
    torch._inductor.config.compile_threads = 1  # or it starts processes that stay
    try:
        torch.compile(lambda x: x + 1)(torch.zeros(2, device=DEVICE))
    except (RuntimeError, OSError, subprocess.SubprocessError) as error:
        pytest.skip(f"torch.compile does not work here: {type(error).__name__}: {str(error)[-200:]}")


class Stepping(Moving):
    """Remembers, on the device, what it was given, and its losses."""

    def __init__(self, step: Step) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(3))
        self.step = step
        self.seen: list[torch.Tensor] = []  # of each batch the first and the last column: its examples
        self.losses: list[torch.Tensor] = []

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        self.seen.append(batch[:, [0, -1]].clone())
        loss = self.step(batch, self.weight)
        self.losses.append(loss.detach().clone())
        return loss


def fit(model: Stepping) -> tuple[int, int]:
    """Trains; returns how often a batch was copied to the device, and how often one was fresh. The batches are right.

    Nothing is traced here: some versions of CUDA cannot trace graphs (torch/profiler/profiler.py).
    """
    data = echoing(loader_of(EXAMPLES, BATCH_SIZE), FACTOR, "after_transfer", buffer_size=4)
    trainer().fit(model, datamodule=data)
    seen = torch.stack(model.seen).cpu()
    assert len(seen) == STEPS
    assert torch.equal(seen[:, :, 0], seen[:, :, 1])
    fresh = data.loader.counts.fresh // BATCH_SIZE
    different = set(map(tuple, seen[:, :, 0].tolist()))
    assert len(different) == fresh < STEPS
    assert len({index for batch in different for index in batch} & set(range(len(EXAMPLES)))) == fresh * BATCH_SIZE
    return model.transfers, fresh


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize("step", [edits, edits_a_part])
def test_edits_in_place_of_a_compiled_step_are_seen(step: Step, backend: str, compiler: None) -> None:
    plain, compiled = Stepping(step), Stepping(torch.compile(step, backend=backend))
    with warns_of_edits(True):
        assert fit(plain)[0] == STEPS
    with warns_of_edits(True):
        assert fit(compiled)[0] == STEPS
    assert torch.equal(torch.stack(plain.seen), torch.stack(compiled.seen))
    torch.testing.assert_close(torch.stack(compiled.losses), torch.stack(plain.losses), rtol=1e-4, atol=1e-4)


def test_a_compiled_step_that_edits_nothing_reuses_the_batch(compiler: None) -> None:
    """On a GPU, ``reduce-overhead`` replays CUDA graphs, into which it copies the batch."""
    model = Stepping(torch.compile(edits_nothing, mode="reduce-overhead"))
    copied, fresh = fit(model)
    assert copied == fresh
    assert torch.stack(model.losses).isfinite().all()


# ---------------------------------------------------------------------- a graph of one's own


class Graphed(Stepping):
    """A step with an update of its own on a static input: captured once and replayed if told to, else run as it is."""

    automatic_optimization = False

    def __init__(self, captures: bool) -> None:
        super().__init__(self.update)
        self.captures = captures

    def update(self, examples: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        loss = (((examples[:, :3] + 1) * weight).sum(dim=1) - 1).pow(2).mean() / len(EXAMPLES) ** 2
        (gradient,) = torch.autograd.grad(loss, weight)
        with torch.no_grad():
            weight.sub_(gradient)
        return loss.detach()

    def on_train_start(self) -> None:
        self.static = torch.zeros(BATCH_SIZE, WIDTH, device=self.device)
        self.replay: Callable[[], None] | None = None
        if self.captures and ON_GPU:
            self.replay = self._captured()

    def _captured(self) -> Callable[[], None]:
        """Captures one update, as torch's notes on CUDA graphs show: after some runs on a stream of their own."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                self.update(self.static, self.weight)
        torch.cuda.current_stream().wait_stream(stream)
        with torch.no_grad():
            self.weight.zero_()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # the thread that pins memory may go on
            self.loss = self.update(self.static, self.weight)
        return graph.replay

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.seen.append(batch[:, [0, -1]].clone())
        self.static.copy_(batch)
        if self.replay is None:
            self.loss = self.update(self.static, self.weight)
        else:
            self.replay()
        self.losses.append(self.loss.clone())

    def configure_optimizers(self) -> None:
        return None


def test_a_replayed_graph_gets_the_batches_and_has_the_losses_of_the_plain_step() -> None:
    plain, graphed = Graphed(captures=False), Graphed(captures=True)
    for model in (plain, graphed):
        copied, fresh = fit(model)
        assert copied == fresh
    assert torch.equal(torch.stack(plain.seen), torch.stack(graphed.seen))
    assert torch.equal(torch.stack(plain.losses), torch.stack(graphed.losses))
    assert torch.stack(plain.losses).unique().numel() > STEPS // 2, "the updates do something"
    assert torch.equal(plain.weight, graphed.weight)
