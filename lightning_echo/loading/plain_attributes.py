"""Attributes of the plain loader that other code reads from an `EchoLoader`.

Only those from which nobody builds another loader: that loader would train without echoing, and nothing would say so.
"""

from __future__ import annotations

from typing import Any, NoReturn

from torch.utils.data import IterableDataset

__all__ = ["PlainAttributes"]


class PlainAttributes:
    """Gives the attributes of the plain loader inside, if that loader has them.

    Attributes:
        loader: The plain loader.
    """

    loader: Any

    @property
    def dataset(self) -> Any:
        """The data set of the loader inside. A stream must be read from there: ``.loader.dataset``.

        Raises:
            AttributeError: The loader inside has no data set, or it is a stream.
        """
        dataset = self.loader.dataset
        if isinstance(dataset, IterableDataset):
            self._refuse("dataset")
        return dataset

    @property
    def batch_size(self) -> Any:
        """The batch size of the loader inside: the number of examples, or None if it has a ``batch_sampler`` of its own."""
        return self.loader.batch_size

    @property
    def collate_fn(self) -> Any:
        """The collate function of the loader inside."""
        return self.loader.collate_fn

    @property
    def drop_last(self) -> Any:
        """Whether the loader inside leaves out a last batch that is not full."""
        return self.loader.drop_last

    @property
    def sampler(self) -> NoReturn:
        """Not there: Lightning would tell epochs to it behind the plan, and others would build a plain loader from it.

        Raises:
            AttributeError: Always.
        """
        self._refuse("sampler")

    def _refuse(self, name: str) -> NoReturn:
        raise AttributeError(
            f"{type(self).__name__} has no {name!r}, since a loader that is built from it would not echo. If a Trainer of "
            "transformers resumes here, set ignore_data_skip=True and load the state of the EchoLoader instead. Otherwise ask "
            f"the plain loader: its .loader.{name}"
        )
