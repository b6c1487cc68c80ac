"""What the ranks of a training have agreed on, after their reader has died: all of them find the same."""

import random
import socket
from types import SimpleNamespace

import pytest
from torch.utils.data import DataLoader

from lightning_echo.pipeline.kinds import kind_of
from lightning_echo.share import server
from lightning_echo.share.attachment import Attachment, Missed
from lightning_echo.share.config import ShareConfig
from lightning_echo.share.connecting import Group, Link, Place
from lightning_echo.share.places import Agreement, Training
from lightning_echo.share.process import ReaderError
from lightning_echo.share.window import Window

PASS = 1000


class Killed(Exception):
    pass


class Dying:
    """The words of a window, of a reader that is killed before it writes the ``left``-th of them."""

    def __init__(self, words, left):
        self.words, self.left = words, left

    def __getitem__(self, at):
        return self.words[at]

    def __setitem__(self, at, value):
        places = [at] if isinstance(at, int) else range(at.start, at.stop)
        for place, number in zip(places, [value] if isinstance(at, int) else value, strict=True):
            if not self.left:
                raise Killed
            self.left -= 1
            self.words[place] = number


@pytest.fixture
def window():
    made = Window.create(2**16, 1, 0)
    yield made
    made.close()


def rank_of_dead_reader(window, *, group="g"):
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    there.close()
    attachment = Attachment(
        ShareConfig("a", behind="skip"),
        lambda _: pytest.fail("a reader is started"),
        {},
        group=Group(group, 2, PASS),
        tell_every=8,
    )
    attachment._link = Link(here, -1, window, Place(0, 0, False), [])
    return attachment


def where(rank, item):
    """Where a rank continues that asks for a round: at a later item, or there, up to another one."""
    try:
        rank._agree(item)
    except Missed as missed:
        return "jump", missed.low
    finally:
        rank._link.connection.close()
    return "until", rank._agreed


def noted(window, agreement, group="g", groups=("g",)):
    window.note_agreement(group, agreement.end, agreement.jumps, groups)


def test_a_rank_that_got_no_answer_does_what_the_others_were_told(window):
    agreement = Agreement()
    agreement.answer(0, 8, low=0, now=0.0)
    noted(window, agreement)
    agreement.answer(8, 16, low=40, now=0.0)  # the other rank misses 8 to 39, and takes 40 to 47
    agreement.answer(40, 48, low=40, now=0.0)
    noted(window, agreement)
    window.low = 60  # then the reader has died
    assert where(rank_of_dead_reader(window), 0) == ("until", 8), "the others have taken these, though they are gone now"
    assert where(rank_of_dead_reader(window), 8) == ("jump", 40)
    assert where(rank_of_dead_reader(window), 40) == ("until", 48)
    assert where(rank_of_dead_reader(window), 48) == ("jump", 60), "nobody was told: all miss what may be gone"
    assert where(rank_of_dead_reader(window), 60) == ("until", 68)


def test_whoever_asks_finds_a_whole_agreement_wherever_its_reader_was_killed(window):
    """The oracle: what was noted before, or what was to be noted."""
    words, before = window._words, (0, [])
    generator = random.Random(0)
    for _ in range(300):
        jumps = [(number, number + 5) for number in range(generator.randrange(4))]
        after = generator.randrange(1, 1000), jumps
        window._words = Dying(words, generator.randrange(12))
        try:
            window.note_agreement("g", *after, ["g"])
        except Killed:
            found = Window.agreement(window, "g")
            assert found in (before, after)
        else:
            found = Window.agreement(window, "g")
            assert found == after
        window._words, before = words, found


def test_ranks_that_take_turns_with_a_reader_that_dies_take_the_same_rounds(window):
    generator = random.Random(1)
    for _ in range(300):
        agreement, low, ranks = Agreement(), 0, [[0, 0, []] for _ in range(3)]  # next, until, taken
        noted(window, agreement)
        for is_dead in (False, True):
            for _ in range(60):
                if not is_dead and len(agreement.jumps) < 3:  # more are not noted: refused, see below
                    low += generator.choice([0, 0, 0, 0, 25])
                rank = generator.choice(ranks)
                if rank[0] >= rank[1]:
                    if is_dead:
                        window.low = low
                        what, item = where(rank_of_dead_reader(window), rank[0])
                    else:
                        is_jump, item = agreement.answer(rank[0], rank[0] + 8, low, 0.0)
                        what = "jump" if is_jump else "until"
                        noted(window, agreement)
                    rank[0 if what == "jump" else 1] = item
                else:
                    rank[2].append(rank[0])
                    rank[0] += 2
                agreement.forget(min(each[0] for each in ranks))
        longest = max((taken for *_, taken in ranks), key=len)
        assert all(taken == longest[: len(taken)] for *_, taken in ranks)
        window.low = 0


def test_what_is_not_known_is_refused(window):
    noted(window, Agreement(48, [(0, 5), (5, 9), (9, 20), (20, 40)]))
    window.low = 60
    with pytest.raises(ReaderError, match="does not know which examples the other ranks have missed"):
        where(rank_of_dead_reader(window), 8)
    assert where(rank_of_dead_reader(window), 60) == ("until", 68), "nobody may have missed these"


def test_groups_that_have_left_make_room_and_one_too_many_is_not_noted(window):
    groups = [f"g{number}" for number in range(17)]
    for end, group in enumerate(groups[:16], 1):
        noted(window, Agreement(end), group, groups)
    window.low = 40
    assert where(rank_of_dead_reader(window, group="new"), 8) == ("jump", 40), "of each that is not noted, none was answered"
    noted(window, Agreement(9, [(0, 9)]), "g16", groups[1:])
    assert window.agreement("g16") == (9, [(0, 9)])
    assert [window.agreement(group)[0] for group in groups[1:16]] == list(range(2, 17))
    noted(window, Agreement(9), "g0", groups)
    assert window.agreement("g0") is None
    with pytest.raises(ReaderError, match="does not know"):
        where(rank_of_dead_reader(window, group="g0"), 8)


def test_the_reader_notes_an_answer_before_the_rank_has_it(window, monkeypatch):
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    kind = kind_of(DataLoader(range(8), num_workers=1))
    reader = server.Server(here, kind, seed=0, data_fingerprint={}, window_bytes=8192, linger_seconds=0.2)
    told = []
    monkeypatch.setattr(server, "send", lambda connection, message: told.append((message, window.agreement("g"))))
    monkeypatch.setattr(reader, "_reading", SimpleNamespace(window=window))
    monkeypatch.setattr(reader, "_move_low", lambda: None)
    training = Training(1, "", "skip", "now", 1, None, False, "g", 2, cursor=0)
    monkeypatch.setattr(reader, "_end_reading", lambda: None)
    with there:
        reader._agree(server._Peer(there, 1, training=training), {"round": 0, "end": 8, "need": 0})
        window.low = 40
        reader._agree(server._Peer(there, 1, training=training), {"round": 8, "end": 16, "need": 0})
    assert told == [({"until": 8}, (8, [])), ({"jump": 40}, (8, [(8, 40)]))]
    reader.close()
