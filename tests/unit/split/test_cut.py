"""A description is cut at a point: what is reused and what is redone, without the data set."""

import pickle
from itertools import accumulate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_echo.split.describe import (
    Chain,
    Convention,
    Description,
    ReadRefused,
    Role,
    SplitRefused,
    cut,
    leaves,
    locate,
    pruned,
)

IMAGE = Chain("transform", ("Resize",), ("Flip",))


def leaf(number=0, *, chains=(), conventions=(), raw=(), **attributes):
    return Description(number, "Files", chains=chains, conventions=conventions, raw_conventions=raw, **attributes)


def routed(role, *inside, number=9):
    return Description(number, "Router", role, inside)


def test_the_likeliest_way_is_taken_where_none_is_given():
    ways = (Convention.transform, Convention.transform_whole)
    dataset = routed(Role.concat, leaf(1, conventions=ways), leaf(2, conventions=ways))
    assert [part.convention for part in cut(dataset, raw=False).leaves] == [ways[0], ways[0]]
    assert [part.convention for part in cut(dataset, ways[1:], raw=False).leaves] == [ways[1], ways[0]]


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
    sent = pickle.loads(pickle.dumps(kind("it is round")))
    assert (sent.reason, isinstance(sent, ValueError)) == ("it is round", True)
    assert str(sent).startswith(f"the data set cannot be {kind.where}: it is round. ")


@settings(max_examples=20)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=5).filter(any), st.data())
def test_an_index_leads_to_where_a_list_of_all_examples_has_it(lengths, data):
    everything = [(part, index) for part, length in enumerate(lengths) for index in range(length)]
    index = data.draw(st.integers(-len(everything), len(everything) - 1))
    assert locate(list(accumulate(lengths)), index) == everything[index]
