"""Values that a text or a number changes easily come out of a record as they were, to the bit."""

import struct

import numpy as np
import pytest
import torch
from PIL import Image, PngImagePlugin

from lightning_echo.cache.record import decode, encode
from lightning_echo.data.difference import difference


def bits_of(number):
    return struct.unpack("<Q", struct.pack("<d", number))[0]


def is_plain(example):
    return encode(example).is_plain


def read_again(example, **options):
    return decode(b"".join(bytes(part) for part in encode(example, **options).parts))


@pytest.mark.parametrize("bits", [0xFFF8000000000000, 0x7FF8000000000123, 0xFFF8000000000007])
def test_a_number_that_is_none_keeps_its_sign_and_its_payload(bits):
    number = struct.unpack("<d", struct.pack("<Q", bits))[0]
    for example in (number, {"x": number}, (number, {1})):
        found = read_again(example)
        found = found["x"] if isinstance(found, dict) else found[0] if isinstance(found, tuple) else found
        assert bits_of(found) == bits


@pytest.mark.parametrize("text", ["\ud83d\ude00", "a\ud83d\ude00b\ud800\udc00", "a\U0001f600"])
def test_surrogates_that_stand_alone_stay_alone(text):
    for example in (text, {text: [text]}):
        assert read_again(example) == example
        assert is_plain(example)


def test_a_number_too_long_for_text_is_kept():
    assert read_again([10**5000]) == [10**5000]


@pytest.mark.parametrize("value", ["", "a\0", "\0", "a\0\0b", "\ud83d\ude00", b"", b"a\0", b"\0\0"], ids=repr)
def test_strings_of_numpy_keep_zeros_at_their_end(value):
    scalar = np.str_(value) if isinstance(value, str) else np.bytes_(value)
    found = read_again([scalar])[0]
    assert type(found) is type(scalar)
    assert [*found] == [*value], "numpy itself drops zeros where it compares"
    assert difference(found, scalar) is None


@pytest.mark.parametrize("axes", [(2, 0, 1), (1, 0, 2), (2, 1, 0)])
def test_arrays_lie_in_memory_as_before(axes):
    array = np.arange(60).reshape(4, 5, 3).transpose(axes)
    found = read_again(array)
    assert found.strides == array.strides
    assert found.tolist() == array.tolist()


def with_palette(mode, info):
    image = Image.new("P", (4, 4))
    image.putpalette(bytes(range(16 * len(mode))), mode)
    image.putdata(range(16))
    image.info.update(info)
    return image


@pytest.mark.parametrize("info", [{}, {"transparency": b"\0\7"}, {"text": PngImagePlugin.iTXt("a", "fr", "k")}], ids=list)
@pytest.mark.parametrize("mode", ["RGB", "RGBA"])
def test_a_palette_keeps_its_transparency(mode, info):
    image = with_palette(mode, info)
    found = read_again([image])[0]
    assert (found.palette.mode, found.info) == (mode, info)
    assert [type(value) for value in found.info.values()] == [type(value) for value in info.values()]
    assert found.convert("RGBA").tobytes() == image.convert("RGBA").tobytes()


def test_a_sparse_tensor_keeps_whether_it_requires_a_gradient_and_its_attributes():
    tensor = torch.eye(2).to_sparse().requires_grad_()
    tensor.note = "left"
    found = read_again([tensor])[0]
    assert found.requires_grad
    assert found.note == "left"
