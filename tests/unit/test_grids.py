"""The cases that `make test` and CI run of a full grid cover what they promise. The oracle counts by brute force."""

from itertools import combinations, product

import pytest
from grids import covering, values_of

A, B, C, D = ["a0", "a1", "a2"], ["b0", "b1"], ["c0", "c1", "c2", "c3"], ["d0", "d1"]
GRIDS = [(A,), (A, B), (A, B, C, D)]


def cases_of(arguments):
    return {values: values for values in product(*arguments)}


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("arguments", GRIDS)
def test_every_combination_occurs_in_a_case_that_is_chosen(arguments, size):
    found = covering(cases_of(arguments), size)
    for places in combinations(range(len(arguments)), size):
        for values in product(*(arguments[place] for place in places)):
            assert any(tuple(case[place] for place in places) == values for case in found), values
    assert len(set(found)) == len(found)


def test_a_large_grid_is_thinned_and_pairs_build_on_the_values():
    grid = cases_of(GRIDS[2])
    values = covering(grid, 1)
    pairs = covering(grid, 2, values)
    assert len(values) == 4  # as many as the argument with the most values
    assert pairs[: len(values)] == values
    assert 12 <= len(pairs) < len(grid) / 2  # 3 x 4 pairs need 12 cases


def test_of_settings_that_are_dictionaries_each_value_occurs_in_a_case_that_is_chosen_and_most_are_left_out():
    all_cases = [({"factor": factor, "reuse": reuse}, workers) for factor in A for reuse in C for workers in B]
    values = {number: values_of({"setting": setting, "workers": workers}) for number, (setting, workers) in enumerate(all_cases)}
    chosen = [all_cases[number] for number in covering(values, 1)]
    assert {setting["factor"] for setting, _ in chosen} == set(A)
    assert {setting["reuse"] for setting, _ in chosen} == set(C)
    assert {workers for _, workers in chosen} == set(B)
    assert len(chosen) == len(C)
