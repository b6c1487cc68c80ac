"""A stream, and a loader, of the reader's items. They take the place of the training's own stream or loader.

`SharedStream` is a stream of items that ends with the reader's pass. The training's loader is made over it, and everything else
is as with any stream. `SharedBatches` is a loader whose batches come from the reader: as whole batches, or as the examples of
each.

An item has its pass and its place in that pass. A resumed run continues from there if the reader can begin at that pass, that is,
if no other training has begun. No reader can begin within a pass, so the items before that place are read and dropped. When a
reader dies, the next one cannot continue within the pass. Then the pass ends there, or the training ends (``share.restart``).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from torch.utils.data import IterableDataset

from lightning_echo.log import LOGGER
from lightning_echo.pipeline.batches import count_examples
from lightning_echo.schema import EchoStateError, entry, state_of
from lightning_echo.share.attachment import Attachment, Missed, NextReader
from lightning_echo.share.config import ShareConfig
from lightning_echo.share.connecting import Place
from lightning_echo.share.packing import END, unpack
from lightning_echo.share.pipeline import cut, joined, rows_of
from lightning_echo.share.process import ReaderError
from lightning_echo.share.stream_reading import At, first_item
from lightning_echo.share.window import Window

_OVER: Any = object()
_SAY_AGAIN_SECONDS = 10.0


class _Item(NamedTuple):
    """An item as it was taken from the reader."""

    kind: int
    data: bytearray
    at: At


class SharedStream(IterableDataset[Any]):
    """The items of the reader, pass after pass."""

    def __init__(self, config: ShareConfig, length: int | None = None) -> None:
        self._config, self._length, self.missed = config, length, 0
        self._attachment: Attachment | None = None
        self._place: Place | None = None  # where this training has entered; None: it has not
        self._at: At | None = None  # the next item's place; None: not known before the item comes
        self._item = 0  # the next item's number
        self._early: _Item | None = None  # the next item, if it was taken already to find out its place
        self._saved_rows: int | None = None  # rows of the pass before the place in a state; None: the state counts items
        self.rows_over = 0

    def attach(self, attachment: Attachment) -> None:
        self._attachment, self._place, self._early = attachment, None, None

    def __iter__(self) -> Iterator[Any]:
        self.entered()
        while True:
            has_begun = self._at is not None and self._at.offset > 0
            item = self._next()
            if item is not None and item.kind != END:
                yield unpack(item.kind, item.data)
            elif item is None or has_begun:
                return
            # else: the training came at the very end of a pass, and has got no item of it

    def state_dict(self) -> dict[str, Any]:
        number, offset = (None, 0) if self._at is None else self._at
        return {"share": self._config.name, "pass": number, "offset": offset}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Loads a `state_dict`: the stream continues there when it enters. Raises an `EchoStateError` if it cannot be that."""
        if state.get("share") != self._config.name:
            raise EchoStateError(
                f"the state is of a run with share={state.get('share')!r}, and this loader has share={self._config.name!r}. "
                f"Resume with the same, or restart without the loader's state"
            )
        with state_of(f"share={self._config.name!r}"):
            number, offset = entry(state, "pass", int | None), entry(state, "offset", int)
            self._saved_rows = entry(state, "rows", int | None, None)
        self._at = None if number is None else At(number, offset)

    # ------------------------------------------------------------------ entering

    def entered(self) -> Place:
        """Returns where this training has entered. Enters first, if this was not done before."""
        assert self._attachment is not None  # a pipeline was started
        if self._place is None:
            wanted = self._at
            wish = None if wanted is None else first_item(wanted.number)
            self._place = place = self._attachment.enter(wish)
            self._item, self._at = place.item, None
            if wanted is not None and place.item == wish:
                self._go_to(wanted, place.batch_size)
            elif place.is_late:
                running = f"{place.others} running training{'s' if place.others > 1 else ''}"
                resumed = "" if wanted is None else ", so this run does not continue where it stopped"
                LOGGER.info("share=%r: joined %s mid-pass%s", self._config.name, running, resumed)
                self._join()
        return self._place

    def _go_to(self, wanted: At, batch_size: int | None) -> None:
        """Goes to a place in the first pass of the reader, whose batches may have another size than those of the last reader."""
        rows, self._saved_rows = self._saved_rows, None
        offset = wanted.offset
        if rows is not None and batch_size is not None:
            offset, self.rows_over = divmod(rows, batch_size)
        self._at = At(wanted.number, 0)
        if offset:
            LOGGER.info("share=%r: continues after %d items of its pass, which are read again", self._config.name, offset)
        while self._at.offset < offset:
            if (item := self._next()) is None or item.kind == END:
                return

    def _join(self) -> None:
        """Begins within a pass, or lets the rest of it go by (``join="pass"``)."""
        name = self._config.name
        if self._config.join == "pass":
            LOGGER.info("share=%r: waits for the next pass", name)
            gone, say_at = 0, time.monotonic() + _SAY_AGAIN_SECONDS
            while (item := self._next()) is not None and item.kind != END:
                gone += 1
                if time.monotonic() > say_at:
                    say_at += _SAY_AGAIN_SECONDS
                    LOGGER.info("share=%r: waits for the next pass; %s items of this one have gone by", name, f"{gone:,}")
            return
        self._early, self._at = self._next(), None
        if self._early is not None:
            gone = self._early.at.offset
            if self._length:
                LOGGER.info("share=%r: it gets %.0f%% of this pass", name, 100 * (1 - gone / self._length))
            else:
                LOGGER.info("share=%r: %s items of this pass have gone by", name, f"{gone:,}")

    # ------------------------------------------------------------------ taking

    def _next(self) -> _Item | None:
        """Returns the next item, or the item that marks the end of the pass; None if the pass has ended without it."""
        item, self._early = self._early, None
        if item is None and (item := self._taken()) is None:
            return None
        if self._at is not None and self._at.offset and item.at.number > self._at.number:
            self._early, self._at = item, At(item.at.number, 0)
            return None
        self._at = At(item.at.number + 1, 0) if item.kind == END else At(item.at.number, item.at.offset + 1)
        return item

    def _taken(self) -> _Item | None:
        """Returns the next item that is still there; None if the rest of a pass is lost."""
        assert self._attachment is not None
        expected = self._item
        while True:
            try:
                kind, data = self._attachment.taken(self._item)
            except Missed as missed:
                self._item = missed.low
                continue
            except NextReader as gone:
                (self._item,) = gone.args
                expected, before, self._at = self._item, self._at, None
                if before is not None and before.offset:
                    LOGGER.warning("share=%r: the rest of pass %d was lost with the reader", self._config.name, before.number)
                    return None
                continue
            item = _Item(kind, data, At.cut_from(data))
            if self._item > expected:
                ends = 0 if self._at is None else item.at.number - self._at.number  # each end is an item, too
                self.missed += self._item - expected - ends
            self._item += 1
            return item

    def follow(self, window: Window, item: int) -> int:
        """Returns the first item to ask the next reader for, or raises a `ReaderError` if the training ends here.

        Called in a thread. ``window`` is that of the dead reader, ``item`` the next item.
        """
        if self._config.restart != "pass":
            raise ReaderError(
                f"the reader of share={self._config.name!r} has died, and no other one finds its place in this data again (a "
                "stream, or a loader of whole batches). share.restart='pass' continues with the next pass"
            )
        end, at = window.end_from(item), self._at
        last = window.copy(end - 1) if end > window.begin else None
        if last is not None:
            return first_item(At.cut_from(last[1]).number + 1)
        return first_item(0 if at is None else at.number + (at.offset > 0))


class SizedSharedStream(SharedStream):
    """A `SharedStream` whose passes have a known length, in items."""

    def __len__(self) -> int:
        assert self._length is not None  # always given
        return self._length


class _Part(NamedTuple):
    """A batch of the reader with rows left, after ``used`` of its ``rows``, and the state of the stream ``before`` it."""

    before: dict[str, Any]
    batch: Any
    used: int
    rows: int


class SharedBatches:
    """A loader of the reader's batches. ``rows`` is the number of examples in the reader's last batch.

    Args:
        length: Number of batches in a pass of the training's own loader; None: a pass ends with the reader's pass.
        batch_size: The training's own batch size. If the reader's loader has another one, batches are cut. None: they are not
            cut.
        collate: Makes a batch from an item that is a list of examples; None: an item is a batch.
    """

    def __init__(
        self, stream: SharedStream, length: int | None, batch_size: int | None, collate: Callable[[Any], Any] | None
    ) -> None:
        self._stream, self._length, self._batch_size, self._collate = stream, length, batch_size, collate
        self._parts: deque[_Part] = deque()
        self._loaded: dict[str, Any] | None = None  # a state, until a batch is read
        self._read_size: int | None = None  # the reader's batch size, where batches may be cut
        self._over: dict[str, Any] | None = None  # the place before the end of a pass, while its last rows are in use
        self._count = 0  # batches since the iteration began. A resumed iteration counts on
        self.rows = 1

    def __len__(self) -> int:
        if self._length is None:
            raise TypeError("the length of a pass is not known")
        return self._length

    def __iter__(self) -> Iterator[Any]:
        while self._length is None or self._count < self._length:
            for batch in self._pass():
                self._loaded = None
                self._count += 1
                yield batch
                if self._count == self._length:
                    break
            if self._length is None:
                break
        self._count = 0

    def state_dict(self) -> dict[str, Any]:
        """Returns the place of the next batch."""
        if self._loaded is not None:
            return self._loaded
        place, used = self._over or self._stream.state_dict(), 0
        if self._parts:
            place, used = self._parts[0].before, self._parts[0].used
        elif place["offset"] and self._read_size is not None:
            used = self.rows - self._read_size  # the last batch of a pass may be smaller
        rows = None if self._read_size is None else place["offset"] * self._read_size + used
        return {**place, "rows": rows, "count": self._count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Loads a `state_dict`."""
        self._stream.load_state_dict(state)
        with state_of("the shared batches"):
            self._count = entry(state, "count", int)
        self._parts.clear()
        self._over, self._loaded = None, state

    def _pass(self) -> Iterator[Any]:
        """Yields the rest of a pass."""
        read, size = self._stream.entered().batch_size, self._batch_size
        if size is not None and read is not None:
            self._read_size = read
        if size is not None and read is not None and (size != read or self._stream.rows_over or self._parts):
            yield from self._cut_pass(size)
            return
        for item in self._stream:
            if self._collate is None:
                self.rows, batch = count_examples(item), item
            else:
                self.rows, batch = len(item), self._collate(item)
            yield batch

    def _cut_pass(self, size: int) -> Iterator[Any]:
        """Yields batches of ``size`` rows. The last batch of a pass may be smaller."""
        parts, items = self._parts, iter(self._stream)
        while True:
            while sum(part.rows - part.used for part in parts) >= size:
                yield self._cut(size)
            before_end = self._stream.state_dict()
            if (batch := next(items, _OVER)) is _OVER:
                break
            place = self._stream.state_dict()
            before = {**place, "offset": place["offset"] - 1}
            self.rows = rows_of(batch)
            skipped, self._stream.rows_over = self._stream.rows_over, 0
            parts.append(_Part(before, batch, skipped, self.rows))
        if any(part.used < part.rows for part in parts):
            self._over = before_end
            yield self._cut(size)
            self._over = None

    def _cut(self, size: int) -> Any:
        """Returns the next ``size`` rows, or fewer if there are no more."""
        parts, found, missing = self._parts, [], size
        while parts and missing:
            before, batch, used, rows = parts.popleft()
            taken = min(missing, rows - used)
            if taken:
                found.append(cut(batch, used, used + taken) if taken < rows else batch)
            missing -= taken
            if used + taken < rows:
                parts.appendleft(_Part(before, batch, used + taken, rows))
        return joined(found)
