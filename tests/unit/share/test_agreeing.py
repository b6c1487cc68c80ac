"""The ranks of a training take the same rounds and miss the same, however they are interleaved."""

from hypothesis import given
from hypothesis import strategies as st

from lightning_echo.share.server import HOLD_SECONDS, Agreement


class Rank:
    """Asks for one round after the other, and goes where it is told."""

    def __init__(self, agreement, block):
        self.agreement, self.block = agreement, block
        self.next = self.until = 0
        self.taken = []

    def step(self, low):
        if self.next >= self.until:
            is_jump, item = self.agreement.answer(self.next, self.next + self.block, low, 0.0)
            if is_jump:
                self.next = item
                return
            self.until = item
        self.taken.append(self.next)
        self.next += 1


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 30)), max_size=200), st.integers(1, 9))
def test_all_ranks_take_the_same_rounds(moves, block):
    agreement, low = Agreement(), 0
    ranks = [Rank(agreement, block) for _ in range(3)]
    for number, step in moves:
        low += step if step > 20 else 0  # the window moves on now and then
        ranks[number].step(low)
        agreement.forget(min(rank.next for rank in ranks))
    longest = max((rank.taken for rank in ranks), key=len)
    for rank in ranks:
        assert rank.taken == longest[: len(rank.taken)]
    assert longest == sorted(set(longest))


def test_what_was_agreed_on_is_held_for_the_slowest_for_a_moment_and_what_all_have_jumped_over_forgotten():
    agreement = Agreement()
    assert agreement.held_from(0, 0.0) is None
    agreement.answer(0, 8, 0, now=1.0)
    assert agreement.held_from(3, 1.0) == 3
    assert agreement.held_from(8, 1.0) is None
    assert agreement.held_from(3, 1.0 + HOLD_SECONDS) is None
    agreement = Agreement()
    agreement.answer(0, 8, low=20, now=0.0)
    assert agreement.answer(4, 8, low=50, now=0.0) == (True, 20)
    agreement.forget(20)
    assert agreement.answer(4, 8, low=50, now=0.0) == (True, 50)
