"""What must hold of a sized loader with an order and a state of its own, and of its data set in a plain ``DataLoader``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from outside_runs import (
    BATCH,
    LENGTH,
    RULES,
    WORKERS_AND_WAYS,
    assert_counts,
    assert_length,
    assert_resumes_exactly,
    fit,
    kill,
    passes,
)
from torch.utils.data import DataLoader

from lightning_echo.schema import EchoStateError


class OwnOrder:
    """A subclass says how loader and data set are made; its module has a fixture ``folder`` with `LENGTH` examples."""

    def data(self, folder: str) -> Any:
        raise NotImplementedError

    def loader(self, folder: str, workers: int, **options: Any) -> Any:
        raise NotImplementedError

    @pytest.mark.parametrize("workers", [0, 2])
    @pytest.mark.parametrize(("options", "steps"), [({}, 6), ({"drop_last": True}, 5)])
    def test_two_epochs_are_as_long_as_without_echoing(self, workers: int, options: Any, steps: int, folder: str) -> None:
        run = fit(lambda: self.loader(folder, workers, **options), epochs=2)
        assert_length(run, steps)
        assert len(self.loader(folder, workers, **options)) == steps
        assert run.loader.insertion_point == "after_batching"

    @pytest.mark.parametrize("reuse", RULES)
    @pytest.mark.parametrize(("workers", "way"), WORKERS_AND_WAYS)
    def test_each_pass_is_fresh_exactly_once_in_the_loaders_own_order(
        self, workers: int, way: str, reuse: str, folder: str
    ) -> None:
        run = fit(lambda: self.loader(folder, workers), way=way, epochs=4, reuse=reuse)
        assert_counts(run, range(LENGTH), complete=2)
        assert_length(run, 6)
        plain = self.loader(folder, workers)
        orders = [[index for batch in plain for index in batch["index"].tolist()] for _ in range(2)]
        assert passes(run, LENGTH)[:2] == orders
        assert orders[0] != orders[1]

    @pytest.mark.parametrize(("workers", "way"), WORKERS_AND_WAYS)
    def test_a_killed_run_goes_on_with_the_same_batches(self, workers: int, way: str, folder: str, tmp_path: Path) -> None:
        assert_resumes_exactly(lambda: self.loader(folder, workers), tmp_path, (1, 4, 6, 10, 11, 12, 15), way=way)

    @pytest.mark.parametrize("reuse", RULES)
    @pytest.mark.parametrize("workers", [0, 2])
    def test_in_a_plain_loader_its_data_set_is_a_stream_that_cannot_be_set_back(
        self, workers: int, reuse: str, folder: str, tmp_path: Path
    ) -> None:
        """The data set's own state wants to be told how many examples were delivered, which only its own loader knows."""

        def make() -> Any:
            return DataLoader(self.data(folder), BATCH, num_workers=workers)

        run = fit(make, epochs=3, reuse=reuse)
        assert run.loader.insertion_point == "after_augmentation"
        assert_counts(run, range(LENGTH), complete=1)
        with pytest.raises(EchoStateError, match="state_dict"):
            fit(make, reuse=reuse, ckpt_path=kill(make, tmp_path, 3, reuse=reuse))
