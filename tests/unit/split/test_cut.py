"""A description is cut at a point: what is reused and what is redone, without the data set."""

import pickle

import pytest
from torchvision.transforms import v2

from lightning_echo.split.describe import (
    Chain,
    Convention,
    Description,
    ReadRefused,
    Role,
    SplitRefused,
    cut,
    describe,
    leaves,
    pruned,
)
from lightning_echo.split.prove import make_stages

IMAGE, TARGET = Chain("transform", ("Resize",), ("Flip",)), Chain("target_transform", ("Pad",), ("Noise",))
PAIR = (Chain("transforms.transform", ("Grayscale",), ("Crop",)), Chain("transforms.target_transform", (), ("Swap",)))
JOINT = Chain("transforms", ("ToImage",), ("Mix",))


def leaf(number=0, *, chains=(), conventions=(), raw=(), **attributes):
    return Description(number, "Files", chains=chains, conventions=conventions, raw_conventions=raw, **attributes)


def routed(role, *inside, number=9):
    return Description(number, "Router", role, inside)


@pytest.mark.parametrize(
    ("convention", "chains", "reused", "redone"),
    [
        (Convention.protocol, (), ("load",), ("augment",)),
        (Convention.transform, (), ("load",), ()),
        (Convention.transform, (IMAGE,), ("load", "Resize"), ("Flip",)),
        (Convention.transform, (TARGET,), ("load", "target Pad"), ("target Noise",)),
        (Convention.transform, (IMAGE, TARGET, *PAIR), ("load", "Resize", "target Pad"), ("Flip", "target Noise")),
        (Convention.transform_joint, (IMAGE, TARGET), ("load", "Resize"), ("Flip",)),
        (Convention.transform_whole, (IMAGE, TARGET), ("load", "Resize"), ("Flip",)),
        (Convention.transform_image_mask, (IMAGE, TARGET), ("load", "Resize"), ("Flip",)),
        (Convention.transforms_joint, (IMAGE, TARGET, *PAIR), ("load", "Grayscale"), ("Crop", "target Swap")),
        (Convention.transforms_joint, (IMAGE, TARGET, JOINT), ("load", "ToImage"), ("Mix",)),
        (Convention.transforms, (IMAGE, JOINT), ("load", "ToImage"), ("Mix",)),
    ],
)
def test_before_the_augmentation_what_is_random_is_redone(convention, chains, reused, redone):
    (found,) = cut(leaf(chains=chains, conventions=(convention,)), raw=False).leaves
    assert (found.convention, found.reused, found.redone) == (convention, reused, redone)


@pytest.mark.parametrize(
    ("convention", "options", "redone"),
    [
        (Convention.read, {"augments": True}, ("decode", "augment")),
        (Convention.read, {}, ("decode",)),
        (Convention.folder, {"chains": (IMAGE, TARGET)}, ("decode", "Resize", "Flip", "target Pad", "target Noise")),
        (Convention.folder, {"chains": (TARGET, *PAIR)}, ("decode", "target Pad", "target Noise")),
    ],
)
def test_after_reading_all_else_is_redone(convention, options, redone):
    (found,) = cut(leaf(raw=(convention,), **options), raw=True).leaves
    assert (found.reused, found.redone) == (("read",), redone)


def test_the_likeliest_way_is_taken_where_none_is_given():
    ways = (Convention.transform, Convention.transform_whole)
    dataset = routed(Role.concat, leaf(1, conventions=ways), leaf(2, conventions=ways))
    assert [part.convention for part in cut(dataset, raw=False).leaves] == [ways[0], ways[0]]
    assert [part.convention for part in cut(dataset, ways[1:], raw=False).leaves] == [ways[1], ways[0]]
    assert [part.convention for part in cut(dataset, ways[::-1], raw=False).leaves] == [ways[1], ways[0]]


def test_a_data_set_that_is_met_twice_is_cut_once():
    one, two = leaf(1), leaf(2)
    dataset = routed(Role.concat, routed(Role.subset, two, number=3), one, two)
    assert leaves(pruned(dataset, raw=False)) == [two, one]


def test_what_a_named_cut_augments_is_cut_inside_only_after_reading_and_where_it_does_not_decode():
    inside = leaf(1, raw=(Convention.read,))
    for decodes, raw, is_inside in [(False, False, False), (True, False, False), (False, True, True), (True, True, False)]:
        own = (Convention.read,) if decodes else ()
        named = Description(0, "Named", Role.named_cut, (inside,), conventions=(Convention.protocol,), raw_conventions=own)
        assert pruned(named, raw).inside == ((inside,) if is_inside else ())
        found = leaves(pruned(routed(Role.subset, named), raw))
        assert [part.number for part in found] == [1 if is_inside else 0]


@pytest.mark.parametrize(
    ("dataset", "given", "raw", "reason"),
    [
        (leaf(is_stream=True), (), False, "Files is a stream"),
        (leaf(is_stream=True), (), True, "Files is a stream"),
        (leaf(raw=(Convention.read,)), (), False, r"Files has neither load\(index\) and augment\(example\) nor a transform"),
        (leaf(why_no_folder="is blue", conventions=(Convention.protocol,)), (), True, r"no read\(index\) .*, and is blue"),
        (leaf(raw=(Convention.read,)), (Convention.folder,), True, "Files no longer has files that torchvision's"),
    ],
)
def test_what_shows_no_way_is_refused(dataset, given, raw, reason):
    with pytest.raises(SplitRefused, match=reason):
        cut(dataset, given, raw=raw)


def test_it_can_be_printed_and_sent():
    dataset = routed(Role.concat, leaf(1, chains=(IMAGE,), conventions=(Convention.transform,)), leaf(2, conventions=("any",)))
    found = cut(dataset, (Convention.transform, Convention.protocol), raw=False)
    assert str(found) == "Files: reuse [load, Resize], redo [Flip]\nFiles: reuse [load], redo [augment]"
    assert pickle.loads(pickle.dumps(found)) == found


@pytest.mark.parametrize("kind", [SplitRefused, ReadRefused])
def test_a_refusal_that_torch_has_made_again_from_its_message_names_the_way_out_once(kind):
    again = kind(f"Caught {kind.__name__} in DataLoader worker process 0.\nOriginal Traceback ...\n{kind('it is round')}")
    assert str(again).count("it is round. ") == str(again).count("StagedDataset.of(") == 1
    assert str(again).startswith(f"Caught {kind.__name__} in")


class Files:
    transform, target_transform = v2.Compose([v2.Pad(1), v2.RandomCrop(4)]), staticmethod(abs)
    augment = read = decode = staticmethod(abs)


@pytest.mark.parametrize("raw", [False, True])
def test_the_stages_have_the_names_of_the_cut(raw):
    (found,) = cut(describe(Files()), raw=raw).leaves
    stages = make_stages(Files(), raw=raw)
    assert (stages.reused, stages.redone) == (found.reused, found.redone)
