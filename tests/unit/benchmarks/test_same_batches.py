"""``benchmarks/same_batches.py``: its settings cover all pairs of values, and its hashes notice what differs in a batch."""

import itertools

import numpy as np
import pytest
import same_batches
import torch


def test_there_are_as_many_different_settings_as_promised_and_all_are_accepted():
    found = same_batches.settings()
    assert len({same_batches.described(setting) for setting in found}) == len(found) == 120
    assert all(same_batches.is_accepted(setting) for setting in found)


def test_every_pair_of_values_that_can_occur_occurs():
    found = same_batches.settings()
    ruled = same_batches._RULED
    whole = [
        dict(zip(ruled, values, strict=True)) for values in itertools.product(*(same_batches.DIMENSIONS[name] for name in ruled))
    ]
    accepted = [setting for setting in whole if same_batches.is_accepted(setting)]
    assert 0 < len(accepted) < len(whole)
    for one, other in itertools.combinations(same_batches.DIMENSIONS, 2):
        pairs = set(itertools.product(same_batches.DIMENSIONS[one], same_batches.DIMENSIONS[other]))
        if one in ruled and other in ruled:
            pairs = {(setting[one], setting[other]) for setting in accepted}
        assert pairs == {(setting[one], setting[other]) for setting in found}, (one, other)


def digest_of(*values):
    digest = same_batches.Digest()
    for value in values:
        digest.add(value)
    return digest.text()


NUMBERS = torch.tensor([1.0, 2.0])


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (NUMBERS, NUMBERS + 1),
        (NUMBERS, NUMBERS.double()),
        (NUMBERS, NUMBERS[None]),
        (NUMBERS, NUMBERS.numpy()),
        ([NUMBERS, 1], (NUMBERS, 1)),
        ([1, [2]], [[1], 2]),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        (1, True),
        ("1", b"1"),
        (same_batches.Point(1.0, 2.0), (1.0, 2.0)),
    ],
)
def test_a_hash_tells_values_types_shapes_and_containers_apart(one, other):
    assert digest_of(one) != digest_of(other)
    assert digest_of(one) == digest_of(one)


def test_a_hash_does_not_depend_on_how_the_memory_of_an_array_is_laid_out():
    array = np.arange(6).reshape(2, 3)
    assert digest_of(array.T) == digest_of(array.T.copy())


def test_what_cannot_be_hashed_is_refused():
    with pytest.raises(TypeError, match="a set cannot be hashed"):
        digest_of({1, 2})


def test_a_difference_names_the_setting_and_both_hashes():
    row = dict(zip(same_batches.FIELDS, ("3", "kind plain", "ab", "cd", "cd"), strict=True))
    assert same_batches.differences([row], [row]) == []
    (found,) = same_batches.differences([row], [{**row, "resumed_second_half": "ce"}])
    assert found == "setting 3 (kind plain): resumed_second_half is 'ce', was 'cd'"


def test_a_setting_that_was_not_written_is_a_difference():
    row = dict(zip(same_batches.FIELDS, ("3", "kind plain", "ab", "cd", "cd"), strict=True))
    assert len(same_batches.differences([], [row])) == 1
