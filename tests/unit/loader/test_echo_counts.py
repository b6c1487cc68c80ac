"""Counts of examples: fresh and echoed ones add up, and their ratio is the factor so far."""

from lightning_echo import EchoCounts


def test_delivered_examples_are_fresh_and_echoed_ones_and_not_those_read_again():
    counts = EchoCounts(fresh=3, echoed=9, refetched=2)
    assert counts.delivered == 12
    assert counts.factor == 4.0


def test_before_the_first_example_the_factor_is_one():
    assert EchoCounts().factor == 1.0
    assert EchoCounts().delivered == 0


def test_counts_of_two_loaders_add_up_field_by_field():
    assert EchoCounts(1, 2, 4) + EchoCounts(10, 20, 40) == EchoCounts(fresh=11, echoed=22, refetched=44)
