"""Seeds of their own: a published hash, different for any numbers in any places."""

from itertools import product

from lightning_echo.echoing.hashing import mix


def test_mixing_is_splitmix64():
    assert mix(0) == 0xE220A8397B1DCDAF  # the first number of the published generator seeded with 0


def test_mixing_tells_numbers_and_their_places_apart():
    pairs = list(product(range(-20, 200), range(200)))
    assert len({mix(*pair) for pair in pairs}) == len(pairs)
    assert all(0 <= mix(*pair) < 2**64 for pair in pairs)
