"""The long run of sharing would notice what it is there to notice."""

import os
import subprocess
import sys

import pytest
import soak


def a_pass(**values):
    good = {"training": 0, "first": (7, 0.5), "examples": 10, "is_exact": True, "is_right": True, "digest": "a"}
    return soak.Pass(**{**good, **values})


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({}, []),
        ({"first": (8, 0.5), "digest": "b"}, []),  # another pass
        ({"is_exact": False, "examples": 9}, ["training 0 lost or repeated examples, of 9"]),
        ({"is_right": False}, ["training 0 had wrong bytes"]),
        ({"training": 1, "digest": "b"}, ["the pass that begins with (7, 0.5) was not the same for all"]),
    ],
)
def test_a_wrong_pass_is_noticed(values, said):
    assert soak.wrong_passes([a_pass(), a_pass(**values)]) == said


@pytest.mark.parametrize(
    ("last", "said"),
    [
        ((100 * 2**20, 12), []),
        ((125 * 2**20, 14), []),
        ((127 * 2**20, 12), ["reader 7 grew from 104,857,600 to 133,169,152 bytes"]),
        ((100 * 2**20, 15), ["reader 7 had 12 descriptors and has 15"]),
    ],
)
def test_growth_is_noticed(last, said):
    samples = [soak.Sample("reader 7", 100 * 2**20, 12), soak.Sample("other", 1, 1), soak.Sample("reader 7", *last)]
    assert soak.growth(samples) == said


def test_the_workers_of_a_process_are_its_children():
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        assert child.pid in soak.children_of(os.getpid())
        assert soak.children_of(child.pid) == []
        child.communicate(b"\n")
    assert child.pid not in soak.children_of(os.getpid())
