"""Packed examples as one array: what goes in comes out, and what is no chunk is refused."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_echo.share.ray import Chunk, ChunkError, Piece

pieces = st.lists(st.builds(Piece, st.integers(0, 255), st.binary(max_size=40)), max_size=6)


@given(first=st.integers(0, 2**62), given=pieces, nanoseconds=st.integers(0, 2**62), cpu=st.integers(0, 2**62))
def test_what_goes_in_comes_out(first, given, nanoseconds, cpu):
    array = Chunk(first, given, nanoseconds, cpu).to_array()
    assert array.dtype == np.uint8
    found = Chunk.from_array(array)
    assert (found.first, found.nanoseconds, found.cpu_nanoseconds) == (first, nanoseconds, cpu)
    assert [(kind, bytes(data)) for kind, data in found.pieces] == [tuple(piece) for piece in given]


def test_the_bytes_are_not_copied():
    array = Chunk(0, [Piece(0, b"abc")]).to_array().copy()
    found = Chunk.from_array(array)
    array[-1] = ord("x")
    assert bytes(found.pieces[0].data) == b"abx"


def test_what_is_no_chunk_is_refused():
    array = Chunk(3, [Piece(0, b"abc"), Piece(1, b"de")]).to_array()
    for end in range(len(array)):
        with pytest.raises(ChunkError, match="chunk"):
            Chunk.from_array(array[:end])
    with pytest.raises(ChunkError, match="has 53 bytes, and it has 54"):
        Chunk.from_array(np.concatenate([array, array[:1]]))
