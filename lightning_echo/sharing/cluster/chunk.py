"""Packed examples that follow each other, as one array of bytes. Nodes send such arrays to each other.

::

    | first item | how many | nanoseconds, processor nanoseconds per example | kind and size of each | bytes of each |
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

__all__ = ["Chunk", "ChunkError", "Piece"]

_HEADER = 4  # numbers
_NUMBER_BYTES = 8
_KIND_SHIFT = 56
_MOST_SIZE = 2**_KIND_SHIFT - 1


class ChunkError(ValueError):
    """An array is no chunk."""


class Piece(NamedTuple):
    """A packed example.

    Attributes:
        kind: What the bytes are, below 256.
        data: The bytes.
    """

    kind: int
    data: Any


class Chunk(NamedTuple):
    """Examples that follow each other in the reader's stream.

    Attributes:
        first: The item of the first example.
        pieces: The examples; empty if there are none yet.
        nanoseconds: Time between two examples of the reader.
        cpu_nanoseconds: Processor time that the reader takes for an example.
    """

    first: int
    pieces: Sequence[Piece]
    nanoseconds: int = 0
    cpu_nanoseconds: int = 0

    def to_array(self) -> Any:
        """Returns the chunk as one array of bytes.

        Example:
            >>> array = Chunk(7, [Piece(0, b"ab"), Piece(2, b"")]).to_array()
            >>> [(kind, bytes(data)) for kind, data in Chunk.from_array(array).pieces]
            [(0, b'ab'), (2, b'')]
        """
        head = [self.first, len(self.pieces), self.nanoseconds, self.cpu_nanoseconds]
        head += [piece.kind << _KIND_SHIFT | len(piece.data) for piece in self.pieces]
        numbers = np.array(head, np.uint64).tobytes()
        return np.frombuffer(b"".join([numbers, *(piece.data for piece in self.pieces)]), np.uint8)

    @classmethod
    def from_array(cls, array: Any) -> Chunk:
        """Returns the chunk of an array that `to_array` has made. The bytes are not copied: they are views of the array.

        Raises:
            ChunkError: The array is no chunk.
        """
        flat: Any = np.ascontiguousarray(array, np.uint8)
        view = memoryview(flat).toreadonly()
        if len(view) < _HEADER * _NUMBER_BYTES:
            raise ChunkError(f"a chunk has {_HEADER * _NUMBER_BYTES} bytes or more, got {len(view)}")
        first, count, nanoseconds, cpu = (int(word) for word in np.frombuffer(view, np.uint64, _HEADER))
        at = (_HEADER + count) * _NUMBER_BYTES
        if at > len(view):
            raise ChunkError(f"a chunk of {count:,} examples has {at:,} bytes or more, got {len(view):,}")
        pieces = []
        for word in np.frombuffer(view, np.uint64, count, _HEADER * _NUMBER_BYTES).tolist():
            size = word & _MOST_SIZE
            pieces.append(Piece(word >> _KIND_SHIFT, view[at : at + size]))
            at += size
        if at != len(view):
            raise ChunkError(f"a chunk says that it has {at:,} bytes, and it has {len(view):,}")
        return cls(first, pieces, nanoseconds, cpu)
