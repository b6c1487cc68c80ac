"""``benchmarks/same_batches.py``: its settings cover all pairs of values, and its hashes notice what differs in a batch."""

import itertools

import pytest
import same_batches
import torch


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
