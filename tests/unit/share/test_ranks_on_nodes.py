"""The ranks of a training on several nodes, each with a reader there: where they begin, and what they cannot miss."""

from types import SimpleNamespace

import pytest

from lightning_echo.share import pipeline
from lightning_echo.share.attachment import Attachment
from lightning_echo.share.config import ShareConfig
from lightning_echo.share.connecting import Group, Place
from lightning_echo.share.pipeline import SharedPipeline
from lightning_echo.share.places import Training, Trainings
from lightning_echo.share.process import ReaderError

HERE, THERE = Group("a-0", 2, 10, elsewhere=1), Group("a", 2, 10)


def training(group, ranks, ranks_here=0, cluster_workers=(0, 0)):
    wait = {"behind": "wait", "join": "now", "wait_for": 1, "wish": None, "goes_on": False}
    return Training(pid=1, label=group, group=group, ranks=ranks, ranks_here=ranks_here, cluster_workers=cluster_workers, **wait)


def entered(monkeypatch, group, others, enter=lambda wish: Place(4, 0, False)):
    """Where a rank begins, and the items to which it moves; ``others`` are the places and errors of the other ranks."""
    moved, asked = [], []

    def gathered(own):
        asked.append(own)
        return [own, *others]

    monkeypatch.setattr(pipeline, "gathered", gathered)
    attachment = SimpleNamespace(group=group, enter=enter, begin_at=moved.append)
    try:
        return SharedPipeline._entered(SimpleNamespace(_attachment=attachment, _config=ShareConfig("a")), 4), moved
    finally:
        assert len(asked) == (1 if group.elsewhere else 0), "the other ranks wait for an answer, whatever happens here"


@pytest.mark.parametrize(("others", "begins"), [([(4, "")], 4), ([(2, "")], 4), ([(6, ""), (9, "")], 9)])
def test_they_begin_where_all_of_them_can(monkeypatch, others, begins):
    place, moved = entered(monkeypatch, HERE, others)
    assert (place.item, place.is_late) == (begins, begins > 4)
    assert moved == ([begins] if begins > 4 else [])
    assert place.there <= place.item


def test_ranks_on_one_node_do_not_ask_each_other(monkeypatch):
    assert entered(monkeypatch, THERE, [(6, "")])[0] == Place(4, 0, False)


def test_an_error_of_one_rank_ends_all_of_them(monkeypatch):
    with pytest.raises(ReaderError, match=r"share='a': another rank could not attach to its reader: no memory is left"):
        entered(monkeypatch, HERE, [(-1, "no memory is left")])

    def fails(wish):
        raise ReaderError("the reader could not begin")

    with pytest.raises(ReaderError, match=r"^the reader could not begin$"):
        entered(monkeypatch, HERE, [(4, "")], fails)


def test_they_miss_nothing_since_the_others_would_train_on_other_parts():
    attachment = Attachment(ShareConfig("a"), lambda follows: pytest.fail("no reader is started"), {}, group=HERE)
    with pytest.raises(ReaderError, match=r"this rank needs item 3, .* the reader of this node has items from 8 on\. Resume"):
        attachment._missed(3, 8)


def test_a_reader_waits_for_the_ranks_of_its_node_alone():
    trainings = Trainings(10)
    trainings.all.append(training("a-0", ranks=3, ranks_here=2))
    assert trainings.ready() == []
    trainings.all.append(training("a-0", ranks=3, ranks_here=2))
    assert trainings.ready() == trainings.all
    trainings.all.append(training("b", ranks=2))
    assert len(trainings.ready()) == 2, "without others elsewhere it waits for all"


def test_of_several_trainings_the_largest_number_of_workers_on_other_machines_counts():
    trainings = Trainings(10)
    assert trainings.cluster_workers == (0, 0)
    trainings.all += [training("a", 1, cluster_workers=(2, 16)), training("b", 1), training("c", 1, cluster_workers=(4, 8))]
    assert trainings.cluster_workers == (4, 16)
