"""Lhotse: its samplers make batches of cuts, which its data sets read; both ways into a ``DataLoader(batch_size=None)``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from project_runs import LENGTH, WAYS, assert_resumes_exactly, assert_right, kill, said, train
from torch.utils.data import DataLoader

from lightning_echo.schema import EchoStateError

lhotse = pytest.importorskip("lhotse", reason="lhotse is not installed: pip install 'lightning-echo[test-outside]'")
soundfile = pytest.importorskip("soundfile", reason="soundfile is not installed: pip install 'lightning-echo[test-outside]'")

from lhotse.dataset import (  # noqa: E402
    DynamicBucketingSampler,
    DynamicCutSampler,
    IterableDatasetWrapper,
    SimpleCutSampler,
    UnsupervisedWaveformDataset,
)

RATE = 8000


@pytest.fixture
def cuts(tmp_path: Path) -> Any:
    """Recordings of their own number, of several lengths, with a text."""
    made = []
    for number in range(LENGTH):
        path = tmp_path / f"{number:02}.wav"
        soundfile.write(path, np.full(400 + 40 * (number % 5), number / 32, np.float32), RATE, subtype="FLOAT")
        recording = lhotse.Recording.from_file(path)
        cut = recording.to_cut()
        spoken = lhotse.SupervisionSegment(str(number), recording.id, start=0, duration=recording.duration, text=f"text {number}")
        cut.supervisions.append(spoken)
        made.append(cut)
    lhotse.CutSet.from_cuts(made).to_jsonl(tmp_path / "cuts.jsonl")
    return lhotse.CutSet.from_jsonl_lazy(tmp_path / "cuts.jsonl")


def see(batch: Any) -> Any:
    """Number and sound of each cut, without what pads it."""
    return [
        (int(cut.recording_id), tuple(sound[:length].tolist()))
        for cut, sound, length in zip(batch["cuts"], batch["audio"], batch["audio_lens"].tolist(), strict=True)
    ]


def plain(cuts: Any) -> dict[int, Any]:
    return {int(cut.recording_id): tuple(cut.load_audio()[0].tolist()) for cut in cuts}


SAMPLERS: dict[str, Any] = {
    "simple": lambda cuts: SimpleCutSampler(cuts.to_eager(), max_cuts=4, shuffle=True),
    "dynamic": lambda cuts: DynamicCutSampler(cuts, max_duration=0.25, shuffle=True),
    "buckets": lambda cuts: DynamicBucketingSampler(cuts, max_duration=0.25, num_buckets=2, shuffle=True, seed=1),
}


def loader(cuts: Any, kind: str, workers: int, data: Any = None) -> Any:
    data = UnsupervisedWaveformDataset() if data is None else data
    return DataLoader(data, sampler=SAMPLERS[kind](cuts), batch_size=None, num_workers=workers)


def stream(cuts: Any, kind: str, workers: int) -> Any:
    """With more workers than one each would deliver all cuts, unless those are dealt out in shards: Lhotse's own rule."""
    data = IterableDatasetWrapper(UnsupervisedWaveformDataset(), SAMPLERS[kind](cuts))
    return DataLoader(data, batch_size=None, num_workers=min(workers, 1))


@pytest.mark.parametrize(("workers", "way"), WAYS)
@pytest.mark.parametrize("kind", SAMPLERS)
@pytest.mark.parametrize("make", [loader, stream])
def test_its_batches_are_reused_and_an_epoch_ends_where_the_sampler_does(
    make: Any, kind: str, workers: int, way: str, cuts: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        run = train(lambda: make(cuts, kind, workers), see, way=way)
    if make is loader:
        assert "batch_size=None, and only its data set knows which examples are in what it yields" in said(caplog)
        assert "an epoch ends when the loader's pass ends" in said(caplog)
    assert_right(run, range(LENGTH), point="after_batching", passes=3, values=plain(cuts))


@pytest.mark.parametrize("make", [loader, stream])
def test_that_it_cannot_be_resumed_within_a_pass_is_said_with_a_hint(
    make: Any, cuts: Any, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    with caplog.at_level("INFO"):
        path = kill(lambda: make(cuts, "simple", 0), see, tmp_path, 3)
    assert "a checkpoint from within a pass cannot be resumed" in said(caplog)
    assert "or the loader is torchdata's StatefulDataLoader" in said(caplog)
    with pytest.raises(EchoStateError, match="state_dict"):
        train(lambda: make(cuts, "simple", 0), see, ckpt_path=path)


# torchdata 0.11 calls a torch function that torch 2.15 deprecates, in every loader.
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")
@pytest.mark.parametrize("workers", [0, 2])
def test_in_torchdatas_loader_a_killed_run_goes_on_exactly(workers: int, cuts: Any, tmp_path: Path) -> None:
    torchdata = pytest.importorskip(
        "torchdata.stateful_dataloader", reason="torchdata is not installed: pip install 'lightning-echo[test-outside]'"
    )

    def make() -> Any:
        data, sampler = UnsupervisedWaveformDataset(), SAMPLERS["simple"](cuts)
        return torchdata.StatefulDataLoader(data, sampler=sampler, batch_size=None, num_workers=workers)

    one = len(train(make, see, epochs=1).model.batches)
    assert_resumes_exactly(make, see, tmp_path, (1, one - 1, one, one + 2), epochs=2)
