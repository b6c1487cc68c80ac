"""The insertion points: where in the input pipeline the echo stage can stand, what is reused and what is redone.

::

    index --read--> raw --decode--> example --augment--> example' --collate--> batch --transfer--> device batch --> step
                   ^               ^                    ^                     ^                    ^
           after_read  before_augmentation     after_augmentation      after_batching       after_transfer

Earlier is better for learning, later is cheaper (Choi et al. 2019, arXiv 1907.05550, section 3).

The members of `InsertionPoint` are a table with a row for each point, the earliest first. The rest of the package asks this
table: no code in another file names a point. To add a sixth point, you would change:

* This table: add a row. If the point needs of the loader what no other point needs, add a member to `Needs`. If it reuses
  something that is not a stage yet, add an entry to `STAGES`. If its live items are in a new place, add a member to `Place`.
* ``pipeline/choice.py``: whether a loader allows the point (`choose`), which examples are read to find out (`_look_once`), and
  the stages that the workers run for it (`_chosen`). A third place to cut a data set at widens `Split.raw` (``split/prove.py``).
* The code that keeps and hands out live items. There is code for examples (``pipeline/worker.py``, for a stream
  ``pipeline/streams.py``), and for batches (``pipeline/batches.py``, on the device ``training/hooks.py``). Write more only if
  none of them fits. A `Kind` in ``pipeline/kinds.py`` starts that code.

Options, messages, the cost model, the analysis and the doctor follow from the row. The tables of the points in the documentation
need a row or a column, too: tests compare them with this table.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Literal, TypeAlias

# The stages of the pipeline in their order, with the name of each in a sentence.
STAGES = {
    "read": "reading",
    "decode": "decoding",
    "augment": "augmentation",
    "collate": "collation",
    "transfer": "the transfer",
}


class Needs(Enum):
    """What the loader must be for an insertion point. The levels are nested: a loader that meets one meets all below it, too."""

    raw_items = "a data set that is read by index and can be cut after reading"
    split = "a data set that is read by index and can be cut before its augmentation"
    examples = "a `DataLoader` that makes batches of examples, also of a stream"
    batches = "any iterable of batches"


class Place(Enum):
    """Where live items are held."""

    workers = "workers"
    main_process = "main process"
    device = "device"


Reads: TypeAlias = Literal["examples", "calls", "stream", "batches"]
"""What is read at a time: an example, those of a batch in one call (``__getitems__``), the next one of a stream, or a batch."""


@dataclass(frozen=True)
class Properties:
    """What the package needs to know of an insertion point.

    Attributes:
        item: What a live item is, in words for users.
        reused: Stages that run once for each fresh example.
        redone: Stages that run for each use.
        by_batches: Whether the items that are echoed are batches, instead of examples.
        place: Where live items are held. Items on the device are handed out by a Trainer's transfer hooks, for a single loader.
        memory: Whose memory live items take, in words for users.
        needs: What the loader must be.
        for_auto: Whether ``auto`` takes the point if it is the earliest one that the loader allows.
        live_batches: The default size of the buffer in batches, or in the examples of so many batches.
    """

    item: str
    reused: tuple[str, ...]
    redone: tuple[str, ...]
    by_batches: bool
    place: Place
    memory: str
    needs: Needs
    for_auto: bool = True
    live_batches: int = 16


class InsertionPoint(str, Enum):
    """Where the echo stage stands. The members are lower-case, because jsonargparse reads enums by their names.

    Source: Choi et al. 2019, arXiv 1907.05550, section 3.

    Attributes:
        after_read: The raw item (compressed bytes) is reused; decoding, augmentation, collation and transfer run for each use.
            ``auto`` never takes this point. It is the right one if memory is short, or if decoding draws random numbers.
        before_augmentation: The decoded example is reused; augmentation, collation and transfer run for each use.
        after_augmentation: The augmented example is reused; collation and transfer run for each use.
        after_batching: The batch on the host is reused; only its transfer runs for each use.
        after_transfer: The batch on the device is reused, without a copy. ``auto`` never takes this point.

            * ``on_before_batch_transfer`` and ``transfer_batch_to_device`` run once per fresh batch.
              ``on_after_batch_transfer`` runs for each use.
            * Live batches take device memory, and as much host memory. If your code edits a tensor in place, the version counter
              of the tensor shows it. The next use is then transferred again from the host.
            * Some edits do not move this counter, so the echo gets the edited batch: edits through ``.data``, DLPack,
              ``.numpy()`` of a tensor on the CPU, or your own kernel.
        auto: The earliest point that the loader allows: ``before_augmentation``, ``after_augmentation`` or ``after_batching``.
        by_batches: Whether the items that are echoed are batches, instead of examples.
        on_device: Whether live items are held on the device.
        option: The argument with which a user asks for the point, for messages.
    """

    _value_: str
    _properties: Properties | None
    by_batches: bool
    on_device: bool
    option: str

    after_read = (
        "after_read",
        Properties(
            item="the raw item: compressed bytes",
            reused=("read",),
            redone=("decode", "augment", "collate", "transfer"),
            by_batches=False,
            place=Place.workers,
            memory="in the workers, the size of the files",
            needs=Needs.raw_items,
            for_auto=False,
        ),
    )
    before_augmentation = (
        "before_augmentation",
        Properties(
            item="the decoded example",
            reused=("read", "decode"),
            redone=("augment", "collate", "transfer"),
            by_batches=False,
            place=Place.workers,
            memory="in the workers",
            needs=Needs.split,
        ),
    )
    after_augmentation = (
        "after_augmentation",
        Properties(
            item="the augmented example",
            reused=("read", "decode", "augment"),
            redone=("collate", "transfer"),
            by_batches=False,
            place=Place.workers,
            memory="in the workers",
            needs=Needs.examples,
        ),
    )
    after_batching = (
        "after_batching",
        Properties(
            item="the batch on the host",
            reused=("read", "decode", "augment", "collate"),
            redone=("transfer",),
            by_batches=True,
            place=Place.main_process,
            memory="in the main process",
            needs=Needs.batches,
        ),
    )
    after_transfer = (
        "after_transfer",
        Properties(
            item="the batch on the device, without a copy",
            reused=("read", "decode", "augment", "collate", "transfer"),
            redone=("on_after_batch_transfer",),
            by_batches=True,
            place=Place.device,
            memory="on the device, and as much on the host",
            needs=Needs.batches,
            for_auto=False,
            live_batches=4,  # device memory is scarce
        ),
    )
    auto = "auto"

    def __new__(cls, value: str, properties: Properties | None = None) -> InsertionPoint:
        member = str.__new__(cls, value)
        member._value_, member._properties = value, properties
        member.by_batches = properties is not None and properties.by_batches
        member.on_device = properties is not None and properties.place is Place.device
        member.option = f"insertion_point={value!r}"
        return member

    @property
    def properties(self) -> Properties:
        """The row of the point.

        Raises:
            ValueError: The point is ``auto``, which stands for one of the others.
        """
        if self._properties is None:
            raise ValueError(f"{self.option} stands for another point and has no properties: choose one first")
        return self._properties

    def __str__(self) -> str:
        return self._value_


# All points without ``auto``, the earliest first.
POINTS = tuple(point for point in InsertionPoint if point is not InsertionPoint.auto)


def points_from(needs: Needs) -> tuple[InsertionPoint, ...]:
    """Returns the points that a loader allows, the earliest first."""
    first = next(number for number, point in enumerate(POINTS) if point.properties.needs is needs)
    return POINTS[first:]


def earliest(needs: Needs) -> InsertionPoint:
    """Returns the earliest point that a loader allows."""
    return points_from(needs)[0]
