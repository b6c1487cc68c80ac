"""An example that was written as a record and read again is the same example, to the bit, in memory of its own."""

import collections
import dataclasses
import gc
import math
import struct

import numpy as np
import pytest
import torch
from PIL import Image, PngImagePlugin
from torchvision import tv_tensors

from lightning_echo.cache.record import ChangedError, NotPlainError, decode, digest_of, encode, encode_plain, is_whole
from lightning_echo.data.difference import difference

Point = collections.namedtuple("Point", ["x", "y"])


@dataclasses.dataclass
class Example:
    image: torch.Tensor
    label: int
    names: list[str]


def data_of(example, **options):
    return b"".join(bytes(part) for part in encode(example, **options).parts)


def read_again(example):
    return decode(data_of(example))


def is_plain(example):
    return encode(example).is_plain


def number_of(bits):
    return struct.unpack("<d", struct.pack("<Q", bits))[0]


def bits_of(number):
    return struct.unpack("<Q", struct.pack("<d", number))[0]


def image_of(mode):
    image = Image.fromarray(np.arange(60, dtype=np.uint8).reshape(5, 4, 3))
    return Image.new(mode, (4, 5), 1000) if mode == "I;16" else image.convert("L" if mode in "1IFLA" else "RGB").convert(mode)


def array_of(dtype):
    numbers = np.arange(6).reshape(2, 3)
    return numbers.astype("<M8[s]").astype(dtype) if "M8" in dtype else numbers.astype(dtype)


TENSORS = [
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.bool,
    torch.float16,
    torch.bfloat16,
    torch.float32,
]
PLAIN = [
    *[None, True, False, 0, -7, 2**70, 1.5, -0.0, 1e-320, math.inf, "", "ä\n\0", "\ud800", b"", b"\0\xff" * 9],
    *[(), [], {}, (1, [2, (3,)]), {"a": 1, 2: "b", (3, None): [b"x"]}, [["tuple", 1], ["bytes", 0, 0, 1]]],
    *["\ud83d\ude00", "a\ud83d\ude00b\ud800\udc00", "a\U0001f600", {"\ud83d\ude00": ["\ud83d\ude00"]}],
    *[
        (torch.arange(24).reshape(2, 3, 4) % 5).to(dtype)
        for dtype in (*TENSORS, torch.float64, torch.complex64, torch.complex128)
    ],
    *[torch.tensor(3.5), torch.empty(0), torch.empty(2, 0, 3), torch.arange(24).reshape(2, 3, 4).permute(2, 0, 1)],
    *[torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last), torch.arange(10)[3:], torch.rand(5, 7).to(torch.bfloat16).T],
    *[
        kind(torch.arange(24, dtype=torch.uint8).reshape(1, 3, 2, 4))
        for kind in (tv_tensors.Image, tv_tensors.Mask, tv_tensors.Video)
    ],
    tv_tensors.BoundingBoxes(torch.arange(24).reshape(6, 4), format="CXCYWH", canvas_size=(10, 20)),
    *[array_of(dtype) for dtype in ("?", "i1", "<u2", ">i4", "<f2", "<f4", "<f8", "<c8", "<M8[ns]", "<m8[s]", "<U5", "S3")],
    *[np.float32(1.5), np.int64(7), np.bool_(True), np.array(3), np.empty((0, 3)), np.asfortranarray(np.eye(3, 2))],
    *[np.arange(60).reshape(4, 5, 3).transpose(axes) for axes in ((2, 0, 1), (1, 0, 2), (2, 1, 0))],
    *[image_of(mode) for mode in ("1", "L", "LA", "RGB", "RGBA", "CMYK", "YCbCr", "HSV", "I", "F", "I;16")],
]


@pytest.mark.parametrize("value", PLAIN, ids=lambda value: type(value).__name__)
def test_what_is_plain_is_the_same_to_the_bit_with_its_type_and_layout(value):
    assert is_plain(value)
    found = read_again({"x": value})["x"]
    assert type(found) is type(value)
    if isinstance(value, torch.Tensor):
        assert (found.dtype, found.shape, found.stride(), vars(found)) == (value.dtype, value.shape, value.stride(), vars(value))
        assert torch.equal(found, value)
    elif isinstance(value, np.ndarray | np.generic):
        assert (found.dtype, found.shape, found.tolist()) == (value.dtype, value.shape, value.tolist())
        assert np.asarray(found).strides == np.asarray(value).strides or not value.size
    elif isinstance(value, Image.Image):
        assert (found.mode, found.size, found.format, found.tobytes()) == (value.mode, value.size, None, value.tobytes())
    else:
        assert (found, repr(found)) == (value, repr(value))


@pytest.mark.parametrize("tensor", [torch.arange(20)[::3], torch.zeros(1).expand(5), torch.eye(4)[:, 1]])
def test_a_tensor_with_gaps_or_shared_elements_takes_memory_for_its_own_elements_alone(tensor):
    found = read_again((tensor, 1))[0]
    assert torch.equal(found, tensor)
    assert found.is_contiguous()


@pytest.mark.parametrize("bits", [bits_of(math.nan), 0xFFF8000000000000, 0x7FF8000000000123, 0xFFF8000000000007], ids=hex)
def test_a_nan_keeps_its_sign_and_its_payload(bits):
    for found in (
        read_again([number_of(bits)])[0],
        read_again({"x": number_of(bits)})["x"],
        read_again((number_of(bits), {1}))[0],
    ):
        assert bits_of(found) == bits
    tensor = torch.tensor([number_of(bits), -0.0, math.inf], dtype=torch.float64)
    assert read_again(tensor).view(torch.int64).tolist() == tensor.view(torch.int64).tolist()


@pytest.mark.parametrize(
    "value",
    [
        *[Point(1, 2), {1, 2}, frozenset("ab"), 1j, range(3), bytearray(b"ab"), slice(1, 2)],
        np.zeros(2, dtype=[("x", "<f4"), ("y", "<i2")]),
        np.array([None, "a"], dtype=object),
        np.ma.masked_array([1, 2], mask=[False, True]),
        np.zeros(2, np.dtype("f4", metadata={"unit": "m"})),
        10**5000,
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_json_cannot_say_is_pickled(value):
    found = read_again([value, 1])[0]
    assert type(found) is type(value)
    assert difference(found, value) is None
    assert getattr(found, "dtype", None) == getattr(value, "dtype", None)
    assert getattr(getattr(found, "dtype", None), "metadata", None) == getattr(getattr(value, "dtype", None), "metadata", None)
    assert not is_plain([value, 1])
    with pytest.raises(NotPlainError):
        encode_plain([value, 1])


@pytest.mark.filterwarnings("ignore:You are using .torch.load.:FutureWarning")  # torch 2.4 warns of its own pickles
@pytest.mark.filterwarnings("ignore:Sparse CS. tensor support is in beta")
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.ones(2, requires_grad=True),
        lambda: torch.complex(torch.ones(2), torch.ones(2)).conj(),
        lambda: torch.nn.Parameter(torch.ones(2)),
        lambda: torch.eye(2).to_sparse().requires_grad_(),
        lambda: torch.eye(2).to_sparse_csr(),
        lambda: torch.eye(2).to_sparse_csc(),
    ],
    ids=["requires grad", "conjugate", "parameter", "sparse", "csr", "csc"],
)
def test_unusual_tensors_are_pickled_with_their_attributes_and_torch_keeps_none(make):
    """Torch's own pickle keeps each sparse tensor that it makes, to look at them at the next ``torch.load``."""
    tensor = make()
    tensor.note = "left"
    gc.collect()
    before = sum(isinstance(each, torch.Tensor) for each in gc.get_objects())
    for _ in range(3):
        found = read_again([tensor])[0]
        assert torch.equal(found.detach().to_dense(), tensor.detach().to_dense())
        assert (found.requires_grad, found.layout, type(found)) == (tensor.requires_grad, tensor.layout, type(tensor))
        assert found.note == "left"
        assert found.layout is not torch.sparse_coo or found.is_coalesced() is tensor.is_coalesced()
    assert not is_plain([tensor])
    del found
    gc.collect()
    assert sum(isinstance(each, torch.Tensor) for each in gc.get_objects()) == before


def test_one_object_that_is_in_an_example_twice_is_one_again_and_two_equal_ones_are_two():
    tensor = torch.zeros(3)
    found = read_again([tensor, {"again": tensor}])
    assert found[0] is found[1]["again"]
    found = read_again(Example(tensor, 1, [tensor]))
    assert found.image is found.names[0]
    first, second = read_again([torch.zeros(3), torch.zeros(3)])
    first += 1
    assert second.tolist() == [0, 0, 0]
    for held in ([1], {"a": 1}):
        found = read_again({"one": held, "other": (held, 5)})
        assert found == {"one": held, "other": (held, 5)}
        assert found["one"] is found["other"][0]
        assert not is_plain([held, held])
        assert is_plain([held.copy(), held.copy()])


@pytest.mark.parametrize("value", ["", "a\0", "\0", "a\0\0b", "\ud83d\ude00", b"", b"a\0", b"\0\0"], ids=repr)
def test_strings_of_numpy_keep_zeros_at_their_end(value):
    scalar = np.str_(value) if isinstance(value, str) else np.bytes_(value)
    found = read_again([scalar])[0]
    assert type(found) is type(scalar)
    assert [*found] == [*value], "numpy itself drops zeros where it compares"


@pytest.mark.parametrize("info", [{}, {"transparency": b"\0\7"}, {"text": PngImagePlugin.iTXt("a", "fr", "k")}], ids=list)
@pytest.mark.parametrize("mode", ["RGB", "RGBA"])
def test_images_keep_palette_transparency_and_information(mode, info):
    image = Image.new("P", (4, 4))
    image.putpalette(bytes(range(16 * len(mode))), mode)
    image.putdata(range(16))
    image.info.update({"dpi": (72, 72), **info})
    found = read_again([image])[0]
    assert (found.palette.mode, found.info) == (mode, image.info)
    assert [type(value) for value in found.info.values()] == [type(value) for value in image.info.values()]
    assert found.convert("RGBA").tobytes() == image.convert("RGBA").tobytes()


class Scan(Image.Image):
    """An image class of a user's."""


def test_an_image_keeps_the_format_of_its_file_and_its_class(tmp_path):
    Image.new("RGB", (3, 2)).save(tmp_path / "image.png")
    opened = Image.open(tmp_path / "image.png")
    assert read_again([opened])[0].format == "PNG"
    assert is_plain(opened)
    image = Image.new("L", (3, 2), 7)
    image.__class__ = Scan
    found = read_again(image)
    assert type(found) is Scan
    assert found.tobytes() == bytes([7] * 6)
    assert not is_plain(image)


def test_a_pickled_one_is_only_read_by_who_wrote_it():
    with pytest.raises(ValueError, match="may only be read by the job that has written it"):
        decode(data_of(Point(1, 2)), trusted=False)
    assert decode(data_of([1]), trusted=False) == [1]


def test_a_header_with_more_than_one_form_is_refused():
    header = b'J["list",1] 2'
    with pytest.raises(ValueError, match="ends after 10 of 12"):
        decode(struct.pack("<II", len(header), 0) + header)


def edit(example):
    if isinstance(example, dict):
        example["x"] += 1
        example["y"][:] = 7
        example["z"].append(2)
    elif isinstance(example, Image.Image):
        example.putpixel((0, 0), 9)
    else:
        getattr(example, "image", example).fill_(3)


@pytest.mark.parametrize(
    "example",
    [
        {"x": torch.zeros(4), "y": np.zeros(4), "z": [1]},
        Example(torch.zeros(4), 1, []),
        tv_tensors.Image(torch.zeros(1, 2, 2)),
        Image.new("L", (2, 2)),
    ],
    ids=lambda example: type(example).__name__,
)
def test_an_edit_reaches_neither_the_record_nor_the_next_copy(example):
    data = bytearray(data_of(example))  # memory that can be written
    before = bytes(data)
    edited = decode(data)
    edit(edited)
    assert difference(edited, example) is not None
    assert bytes(data) == before
    assert difference(decode(data), example) is None


def test_a_checksum_notices_any_changed_bit_any_cut_and_another_owner():
    data = bytearray(data_of({"x": torch.arange(5), "y": "a"}, checksum=True, owner=7))
    assert is_whole(data, 7)
    assert not any(is_whole(data, key) for key in range(20) if key != 7)
    assert not any(is_whole(data[:length], 7) for length in range(len(data)))
    for place in range(len(data)):
        for bit in range(8):
            data[place] ^= 1 << bit
            assert not is_whole(data, 7), (place, bit)
            data[place] ^= 1 << bit


class LeavesOut:
    def __init__(self, **attributes):
        self.__dict__.update(attributes)

    def __getstate__(self):
        return {name: value for name, value in vars(self).items() if name != "cache"}


class EmptiedOnTheWay(LeavesOut):
    def __getstate__(self):
        return {**vars(self), "cache": None}


class CannotComeBack:
    def __reduce__(self):
        return int, ("seven",)


@pytest.mark.parametrize(
    "make",
    [lambda: LeavesOut(label=1, cache=2), lambda: EmptiedOnTheWay(label=1, cache=[2]), lambda: np.longlong(3), CannotComeBack],
    ids=["attribute", "emptied", "another type", "an error"],
)
def test_what_would_come_out_changed_is_not_written(make):
    with pytest.raises(ChangedError, match="it would come out changed"):
        encode({"image": torch.zeros(3), "rest": [make()]})


def test_digests_depend_neither_on_the_order_of_a_set_nor_on_which_strings_are_one_object():
    one, other = {0, 8}, {8, 0}
    assert [*one] != [*other], "as the order of strings differs from process to process"
    assert digest_of([{"words": one, "more": Point(one, [1])}]) == digest_of([{"words": other, "more": Point(other, [1])}])
    text, again = ("".join(["some ", "text"]) for _ in range(2))
    assert digest_of([Point({text}, [text, text])]) == digest_of([Point({text}, [text, again])])


def test_digests_of_unequal_examples_differ_and_an_example_may_refer_to_itself():
    examples = [1, 1.0, "1", [1], (1,), {1}, {2}, frozenset({1}), Point(1, {2}), Point(2, {1}), torch.ones(1), np.ones(1)]
    assert len({digest_of([example]) for example in examples}) == len(examples)
    assert digest_of(["a", "b"]) != digest_of(["ab"]) != digest_of(["b", "a"])
    images = [{"image": torch.zeros(5), "id": number} for number in (1, 1, 2)]
    assert digest_of(images[:1]) == digest_of(images[1:2]) != digest_of(images[2:])
    example = [Point(1, 2)]
    example.append(example)
    assert digest_of([example]) == digest_of([example])


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(5000, dtype=torch.uint8).reshape(10, 500),
        torch.arange(3000, dtype=torch.float32) / 7,
        torch.arange(900, dtype=torch.int64).reshape(3, 300),
        torch.arange(1000) % 2 == 0,
    ],
    ids=lambda tensor: str(tensor.dtype),
)
def test_of_ones_own_record_a_large_tensor_is_the_memory_and_what_is_small_is_a_copy(tensor):
    small = torch.tensor([7.0, 8.0])
    record = bytearray(b"".join(encode({"small": small, "large": tensor}).parts))
    found = decode(record, trusted=False, is_own=True)
    assert torch.equal(found["large"], tensor)
    assert torch.equal(found["small"], small)
    before = bytes(record)
    found["small"].fill_(1)
    assert bytes(record) == before
    found["large"].fill_(0)
    assert bytes(record) != before
    alone = bytearray(b"".join(encode(tensor).parts))
    assert torch.equal(decode(alone, trusted=False, is_own=True), tensor)
    assert torch.equal(decode(memoryview(alone)), tensor)
