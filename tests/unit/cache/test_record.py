"""An example that was written as a record and read again is the same example, in memory of its own."""

import collections
import dataclasses
import gc
import math
import struct
import subprocess
import sys
import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torchvision import tv_tensors

from lightning_echo.cache import record as reading
from lightning_echo.cache.record import ChangedError, decode, digest_of, encode, is_whole

Point = collections.namedtuple("Point", ["x", "y"])


@dataclasses.dataclass
class Example:
    image: torch.Tensor
    label: int
    names: list[str]


def read_again(example, **options):
    record = encode(example, **options)
    data = b"".join(bytes(part) for part in record.parts)
    assert len(data) == record.size
    return decode(data)


def is_plain(example):
    return encode(example).is_plain


class TestValues:
    @pytest.mark.parametrize(
        "value",
        [
            *[None, True, False, 0, -7, 2**70, 1.5, -0.0, 1e-320, math.inf, "", "ä\n\0", "\ud800", b"", b"\0\xff" * 9],
            *[(), [], {}, (1, [2, (3,)]), {"a": 1, 2: "b", (3, None): [b"x"]}, [["tuple", 1], ["bytes", 0, 0, 1]]],
        ],
        ids=repr,
    )
    def test_are_the_same_with_their_types(self, value):
        found = read_again(value)
        assert found == value
        assert type(found) is type(value)
        assert repr(found) == repr(value), "also what is in it"
        assert is_plain(value)

    def test_nan_stays_nan(self):
        assert math.isnan(read_again([math.nan])[0])

    @given(
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
            lambda inner: (
                st.lists(inner)
                | st.lists(inner).map(tuple)
                | st.dictionaries(st.text() | st.integers() | st.tuples(st.integers(), st.text()), inner)
            ),
            max_leaves=12,
        )
    )
    @settings(max_examples=300, deadline=None)
    def test_of_any_nesting(self, value):
        assert is_plain(value)
        assert repr(read_again(value)) == repr(value)

    @pytest.mark.parametrize(
        "value",
        [Point(1, 2), {1, 2}, frozenset("ab"), 1j, range(3), bytearray(b"ab"), slice(1, 2)],
        ids=lambda value: type(value).__name__,
    )
    def test_of_other_types_are_pickled(self, value):
        found = read_again([value, 1])
        assert found == [value, 1]
        assert type(found[0]) is type(value)
        assert not is_plain([value, 1])


class TestTensors:
    @pytest.mark.parametrize(
        "dtype",
        [
            *[torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool, torch.float16, torch.bfloat16],
            *[torch.float32, torch.float64, torch.complex64, torch.complex128],
        ],
    )
    def test_of_all_types(self, dtype):
        tensor = (torch.arange(24).reshape(2, 3, 4) % 5).to(dtype)
        found = read_again({"x": tensor})["x"]
        assert found.dtype is dtype
        assert torch.equal(found, tensor)
        assert is_plain(tensor)

    @pytest.mark.parametrize(
        "make",
        [
            lambda: torch.tensor(3.5),
            lambda: torch.empty(0),
            lambda: torch.empty(2, 0, 3),
            lambda: torch.arange(24).reshape(2, 3, 4).permute(2, 0, 1),
            lambda: torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last),
            lambda: torch.arange(10)[3:],
            lambda: torch.rand(5, 7).T,
        ],
    )
    def test_keep_shape_and_strides(self, make):
        tensor = make()
        found = read_again((tensor, 1))[0]
        assert torch.equal(found, tensor)
        assert (found.shape, found.stride()) == (tensor.shape, tensor.stride())

    @pytest.mark.parametrize(
        "make", [lambda: torch.arange(20)[::3], lambda: torch.zeros(1).expand(5), lambda: torch.eye(4)[:, 1]]
    )
    def test_with_gaps_or_shared_elements_become_dense(self, make):
        found = read_again(make())
        assert torch.equal(found, make())
        assert found.is_contiguous()

    def test_nan_and_signed_zero_keep_their_bits(self):
        tensor = torch.tensor([math.nan, -0.0, math.inf])
        assert read_again(tensor).view(torch.int32).tolist() == tensor.view(torch.int32).tolist()

    @pytest.mark.filterwarnings("ignore:You are using .torch.load.:FutureWarning")  # torch 2.4 warns of its own pickles
    @pytest.mark.parametrize(
        "tensor",
        [
            torch.ones(2, requires_grad=True),
            torch.eye(2).to_sparse(),
            torch.complex(torch.ones(2), torch.ones(2)).conj(),
            torch.nn.Parameter(torch.ones(2)),
        ],
        ids=["requires grad", "sparse", "conjugate", "parameter"],
    )
    def test_that_are_not_plain_are_pickled(self, tensor):
        found = read_again([tensor])[0]
        assert torch.equal(found.to_dense(), tensor.to_dense())
        assert (found.requires_grad, found.layout, type(found)) == (tensor.requires_grad, tensor.layout, type(tensor))
        assert not is_plain([tensor])

    @pytest.mark.filterwarnings("ignore:You are using .torch.load.:FutureWarning")  # torch 2.4 warns of its own pickles
    def test_with_attributes_keep_them(self):
        tensor = torch.ones(2)
        tensor.note = "left"
        assert read_again([tensor])[0].note == "left"

    def test_one_that_is_in_an_example_twice_is_one_object_again(self):
        tensor = torch.zeros(3)
        for example in ([tensor, {"again": tensor}], Example(tensor, 1, [tensor])):
            found = read_again(example)
            first, second = found if isinstance(found, list) else (found.image, found.names[0])
            assert first is (second["again"] if isinstance(second, dict) else second)

    def test_and_two_that_are_equal_are_two(self):
        first, second = read_again([torch.zeros(3), torch.zeros(3)])
        first += 1
        assert second.tolist() == [0, 0, 0]


class TestTvTensors:
    @pytest.mark.parametrize("kind", [tv_tensors.Image, tv_tensors.Mask, tv_tensors.Video])
    def test_keep_their_class(self, kind):
        tensor = kind(torch.arange(24, dtype=torch.uint8).reshape(1, 3, 2, 4))
        found = read_again({"image": tensor})["image"]
        assert type(found) is kind
        assert torch.equal(found, tensor)
        assert is_plain(tensor)

    @pytest.mark.parametrize("form", ["XYXY", "CXCYWH"])
    def test_boxes_keep_format_and_canvas(self, form):
        boxes = tv_tensors.BoundingBoxes(torch.rand(3, 4), format=form, canvas_size=(10, 20))
        found = read_again((boxes, 1))[0]
        assert type(found) is tv_tensors.BoundingBoxes
        assert torch.equal(found, boxes)
        assert (found.format, found.canvas_size) == (boxes.format, (10, 20))
        assert {**found.__dict__} == {**boxes.__dict__}
        assert is_plain(boxes)


class TestArrays:
    @pytest.mark.parametrize("dtype", ["?", "i1", "<u2", ">i4", "<f2", "<f4", "<f8", "<c8", "<M8[ns]", "<m8[s]", "<U5", "S3"])
    def test_of_all_types(self, dtype):
        array = np.arange(6).astype("<M8[s]").astype(dtype) if "M8" in dtype else np.arange(6).astype(dtype)
        found = read_again([array.reshape(2, 3)])[0]
        assert (found.dtype, found.tolist()) == (array.dtype, array.reshape(2, 3).tolist())
        assert is_plain(array)

    @pytest.mark.parametrize(
        "array",
        [np.float32(1.5), np.int64(7), np.bool_(True), np.array(3), np.empty((0, 3)), np.asfortranarray(np.eye(3, 2))],
        ids=repr,
    )
    def test_and_scalars_keep_their_kind(self, array):
        found = read_again([array])[0]
        assert type(found) is type(array)
        assert (found.dtype, found.shape, found.tolist()) == (array.dtype, array.shape, array.tolist())
        assert np.asarray(found).flags.f_contiguous == np.asarray(array).flags.f_contiguous

    @pytest.mark.parametrize(
        "array",
        [
            np.array([None, "a"], dtype=object),
            np.zeros(2, dtype=[("x", "<f4"), ("y", "<i2")]),
            np.ma.masked_array([1, 2], mask=[False, True]),
        ],
        ids=["object", "structured", "masked"],
    )
    def test_that_are_not_plain_are_pickled(self, array):
        found = read_again([array])[0]
        assert (type(found), found.dtype, found.tolist()) == (type(array), array.dtype, array.tolist())
        assert not is_plain([array])


class TestImages:
    @pytest.mark.parametrize("mode", ["1", "L", "LA", "RGB", "RGBA", "CMYK", "YCbCr", "HSV", "I", "F", "I;16"])
    def test_keep_mode_and_pixels(self, mode):
        image = Image.fromarray(np.arange(60, dtype=np.uint8).reshape(5, 4, 3))
        image = (
            Image.new(mode, (4, 5), 1000)
            if mode == "I;16"
            else image.convert("RGB").convert("L" if mode in "1IFLA" else "RGB").convert(mode)
        )
        found = read_again((image, 3))[0]
        assert (found.mode, found.size) == (mode, image.size)
        assert found.tobytes() == image.tobytes()
        assert is_plain(image)

    def test_keep_palette_and_information(self):
        image = Image.fromarray(np.arange(64, dtype=np.uint8).reshape(8, 8, 1).repeat(3, 2)).quantize(8)
        image.info = {"dpi": (72, 72), "icc_profile": b"\0\1"}
        found = read_again([image])[0]
        assert (found.mode, found.info) == ("P", image.info)
        assert found.convert("RGB").tobytes() == image.convert("RGB").tobytes()


class TestOfClasses:
    def test_a_data_class_is_pickled_and_its_tensors_are_not(self):
        example = Example(torch.zeros(1000), 3, ["a"])
        record = encode(example)
        found = read_again(example)
        assert not record.is_plain
        assert (type(found), found.label, found.names) == (Example, 3, ["a"])
        assert torch.equal(found.image, example.image)
        assert sum(len(bytes(part)) for part in record.parts[:2]) < 500

    def test_a_pickled_one_is_only_read_by_who_wrote_it(self):
        data = b"".join(map(bytes, encode(Point(1, 2)).parts))
        with pytest.raises(ValueError, match="may only be read by the job that has written it"):
            decode(data, trusted=False)
        assert decode(b"".join(map(bytes, encode([1]).parts)), trusted=False) == [1]

    def test_what_cannot_be_pickled_says_so(self):
        with pytest.raises(Exception, match="pickle"):
            encode([lambda: 0])


@pytest.mark.parametrize(
    "example",
    [
        {"x": torch.zeros(4), "y": np.zeros(4), "z": [1]},
        Example(torch.zeros(4), 1, []),
        tv_tensors.Image(torch.zeros(1, 2, 2)),
    ],
    ids=lambda example: type(example).__name__,
)
def test_an_edit_reaches_neither_the_record_nor_the_next_copy(example):
    data = b"".join(map(bytes, encode(example).parts))
    before = repr(decode(data)), bytes(data)
    edited = decode(data)
    if isinstance(edited, dict):
        edited["x"] += 1
        edited["y"][:] = 7
        edited["z"].append(2)
    elif isinstance(edited, Example):
        edited.image.fill_(3)
    else:
        edited.fill_(1)
    assert (repr(decode(data)), data) == before


def test_nor_where_the_record_is_in_memory_that_can_be_written():
    data = bytearray(b"".join(map(bytes, encode(torch.zeros(3)).parts)))
    decode(data).fill_(7)
    assert decode(data).tolist() == [0, 0, 0]


def test_an_edit_of_an_image_does_not_either():
    data = b"".join(map(bytes, encode(Image.new("L", (2, 2))).parts))
    decode(data).putpixel((0, 0), 9)
    assert decode(data).getpixel((0, 0)) == 0


def test_buffers_begin_where_vector_instructions_like_them():
    record = encode([b"abc", torch.zeros(3), np.zeros(5)])
    sizes = [len(bytes(part)) for part in record.parts]
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    assert all(start % 16 == 0 for start, size in zip(starts[3:], sizes[3:], strict=True) if size >= 16)


class TestChecksum:
    def test_any_changed_byte_is_noticed(self):
        data = bytearray(b"".join(map(bytes, encode({"x": torch.arange(5), "y": "a"}, checksum=True).parts)))
        assert is_whole(data)
        for place in range(len(data)):
            for bit in range(8):
                data[place] ^= 1 << bit
                assert not is_whole(data), (place, bit)
                data[place] ^= 1 << bit
        assert is_whole(data)

    def test_a_shorter_header_makes_no_other_number(self):
        """The size of the header is a part of what the checksum covers."""
        data = bytearray(b"".join(map(bytes, encode(123466, checksum=True).parts)))
        assert decode(data) == 123466
        data[0] ^= 1
        assert decode(data) == 12346, "as if nothing were wrong"
        assert not is_whole(data)

    def test_a_record_cut_short_is_noticed(self):
        data = b"".join(map(bytes, encode({"x": torch.arange(5)}, checksum=True).parts))
        assert not any(is_whole(data[:length]) for length in range(len(data)))

    def test_the_first_number_is_the_size_of_the_header(self):
        record = encode([1, 2], checksum=True)
        assert struct.unpack_from("<I", b"".join(map(bytes, record.parts)))[0] == len(record.parts[1])

    def test_and_belongs_to_its_key(self):
        data = b"".join(encode([1, 2], checksum=True, owner=7).parts)
        assert is_whole(data, 7)
        assert not any(is_whole(data, key) for key in range(20) if key != 7)


class Scan(Image.Image):
    """An image class of a user's."""


def test_an_image_keeps_the_format_of_its_file(tmp_path):
    """Some transforms ask for it; a copy for an echo keeps it, too."""
    Image.new("RGB", (3, 2)).save(tmp_path / "image.png")
    opened = Image.open(tmp_path / "image.png")
    assert read_again([opened])[0].format == "PNG"
    assert is_plain(opened)
    assert read_again([Image.new("L", (3, 2))])[0].format is None


def test_an_image_of_a_class_of_the_users_own_keeps_it():
    image = Image.new("L", (3, 2), 7)
    image.__class__ = Scan
    found = read_again(image)
    assert type(found) is Scan
    assert found.tobytes() == bytes([7] * 6)
    assert not is_plain(image)


@pytest.mark.parametrize("held", [[1], {"a": 1}], ids=["list", "dict"])
def test_a_list_or_dict_that_is_in_an_example_twice_is_one_again(held):
    found = read_again({"one": held, "other": (held, 5)})
    assert found == {"one": held, "other": (held, 5)}
    assert found["one"] is found["other"][0]
    assert not is_plain([held, held])
    assert is_plain([list(held), list(held)])


@pytest.mark.filterwarnings("ignore:Sparse CS. tensor support is in beta")
@pytest.mark.parametrize("make", ["to_sparse", "to_sparse_csr", "to_sparse_csc"])
def test_sparse_tensors_are_the_same_and_torch_keeps_none_of_them(make):
    """Torch's pickle keeps each one that it makes, to look at them at the next ``torch.load``."""
    tensor = getattr(torch.tensor([[0.0, 2.0, 0.0], [3.0, 0.0, -1.0]]), make)()
    gc.collect()
    before = sum(type(each) is torch.Tensor for each in gc.get_objects())
    for _ in range(5):
        found = read_again([tensor])[0]
        assert found.layout is tensor.layout
        assert torch.equal(found.to_dense(), tensor.to_dense())
        assert (found.layout is not torch.sparse_coo) or found.is_coalesced() is tensor.is_coalesced()
    del found
    gc.collect()
    assert sum(type(each) is torch.Tensor for each in gc.get_objects()) == before


def test_a_header_with_more_than_one_form_is_refused():
    header = b'J["list",1] 2'
    with pytest.raises(ValueError, match="ends after 10 of 12"):
        decode(struct.pack("<II", len(header), 0) + header)


# --- to the bit, or not at all ----------------------------------------------------------------------------------------


def test_metadata_of_a_type_are_kept():
    array = np.zeros(2, np.dtype("f4", metadata={"unit": "m"}))
    assert read_again([array])[0].dtype.metadata == {"unit": "m"}


class LeavesOut:
    """Its pickle has not all that it has."""

    def __init__(self, **attributes):
        self.__dict__.update(attributes)

    def __getstate__(self):
        return {name: value for name, value in vars(self).items() if name != "cache"}


class EqualAnyway(LeavesOut):
    def __eq__(self, other):
        return self.label == other.label

    __hash__ = None


class Noted(list):
    def __reduce__(self):
        return Noted, (list(self),)


class EmptiedOnTheWay(LeavesOut):
    def __getstate__(self):
        return {**vars(self), "cache": None}


class CannotComeBack:
    def __reduce__(self):
        return int, ("seven",)


def noted():
    made = Noted([1])
    made.note = 3
    return made


@pytest.mark.parametrize(
    "make",
    [
        lambda: LeavesOut(label=1, cache=2),
        lambda: EqualAnyway(label=1, cache=2),
        lambda: EmptiedOnTheWay(label=1, cache=[2]),
        lambda: np.longlong(3),
        CannotComeBack,
        noted,
    ],
    ids=["attribute", "equal by ==", "emptied", "another type", "an error", "a list with attributes"],
)
def test_what_would_come_out_changed_is_not_written(make):
    with pytest.raises(ChangedError, match="it would come out changed"):
        encode({"image": torch.zeros(3), "rest": [make()]})


def test_what_leaves_out_nothing_is_written():
    for example in (LeavesOut(label=1), EqualAnyway(label=1), EmptiedOnTheWay(label=1, cache=None)):
        assert vars(read_again([example])[0]) == vars(example)


class Part(torch.Tensor):
    """A tensor class of a user's."""


@pytest.mark.parametrize(
    "make",
    [
        lambda big: big[:3].as_subclass(Part),
        lambda big: big[:3].requires_grad_(),
        lambda big: torch.view_as_complex(big.reshape(-1, 2))[:3].conj(),
    ],
    ids=["subclass", "gradient", "conjugate"],
)
def test_a_part_of_a_large_tensor_takes_no_more_than_its_elements(make):
    part = make(torch.arange(2.0**18))
    record = encode([part])
    found = decode(b"".join(map(bytes, record.parts)))[0]
    assert record.size < 2000
    assert type(found) is type(part)
    assert torch.equal(found, part)


class TestMemory:
    @pytest.mark.parametrize("is_own", [False, True])
    @pytest.mark.parametrize("place", [1, 2, 3])
    def test_a_small_part_that_is_kept_keeps_nothing_else(self, place, is_own):
        example = (torch.zeros(10**6), torch.tensor([7]), np.array([7]), Example(torch.tensor([7]), 1, []))
        data = b"".join(map(bytes, encode(example).parts))
        tracemalloc.start()
        try:
            kept = [decode(bytearray(data), is_own=is_own)[place] for _ in range(5)]
            assert tracemalloc.get_traced_memory()[0] < 10**6
        finally:
            tracemalloc.stop()
        assert [int(getattr(part, "image", part)[0]) for part in kept] == [7] * 5

    def test_long_headers_are_not_remembered(self):
        reading._remembered_maker.cache_clear()
        for start in range(5):
            assert read_again([list(range(start, 2000)), torch.tensor(start)])[1].item() == start
        assert reading._remembered_maker.cache_info().currsize == 0
        read_again((torch.zeros(3), 7))
        assert reading._remembered_maker.cache_info().currsize == 1


class TestDigests:
    def test_of_sets_are_the_same_in_all_processes(self):
        program = (
            "from lightning_echo.cache.record import digest_of;"
            "print(digest_of([{'words': set('abcdefgh'), 'more': (frozenset({'x', 'yz', 'z'}), [1])}]).hex())"
        )
        found = {
            subprocess.run(
                [sys.executable, "-c", program],
                env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
                text=True,
                capture_output=True,
                check=True,
            ).stdout
            for seed in ("1", "2")
        }
        assert len(found) == 1

    def test_do_not_depend_on_which_strings_are_one_object(self):
        text = "".join(["some ", "text"])
        again = "".join(["some ", "text"])
        assert digest_of([Point({text}, [text, text])]) == digest_of([Point({text}, [text, again])])

    def test_of_unequal_examples_differ(self):
        examples = [1, 1.0, "1", [1], (1,), {1}, {2}, frozenset({1}), Point(1, {2}), Point(2, {1}), torch.ones(1), np.ones(1)]
        assert len({digest_of([example]) for example in examples}) == len(examples)
        assert digest_of(["a", "b"]) != digest_of(["ab"])

    def test_of_an_example_that_refers_to_itself(self):
        example = [Point(1, 2)]
        example.append(example)
        assert digest_of([example]) == digest_of([example])
