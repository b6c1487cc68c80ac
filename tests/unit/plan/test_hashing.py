"""Seeds come from a published hash, which is another one for any other numbers in any order."""

from itertools import product

from lightning_echo.plan.plan import mix, named_seed


def test_mixing_is_splitmix64():
    assert mix(0) == 0xE220A8397B1DCDAF  # the first number of the published generator seeded with 0


def test_mixing_tells_numbers_and_their_places_apart():
    pairs = list(product(range(-20, 200), range(200)))
    assert len({mix(*pair) for pair in pairs}) == len(pairs)
    assert all(0 <= mix(*pair) < 2**64 for pair in pairs)


def test_a_name_makes_a_seed_its_own_and_no_name_leaves_it():
    assert named_seed(7, "") == 7
    names = ["a", "b", "ab", "ba", "a/0", "a/1", "\u00e9", "labelled", "unlabelled"]
    seeds = {named_seed(seed, name) for name in names for seed in range(100)}
    assert len(seeds) == 900
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert named_seed(7, "a") == mix(7, 97) // 2  # the same on every machine, unlike hash()
