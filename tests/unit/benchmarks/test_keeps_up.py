import pytest
from keeps_up import Pair, tables


def rules(pairs: list[Pair]) -> dict[str, list[str]]:
    found = tables(pairs, 252)[0]
    return {cells[0]: cells[1:] for cells in found.cells()}


def pair(demand: float = 20.1, waited: float = 0.0, echoed: float = 0.0) -> Pair:
    return Pair(0.02, demand / 1e3, waited, 0.0, echoed)


@pytest.mark.parametrize(
    ("echoed", "waited", "met"),
    [
        ((0.01, 0.009), (0.0, 0.0), "yes"),
        ((0.02, 0.002), (0.0, 0.0), "NO"),  # the mean, not the better run
        ((0.02, 0.002), (0.0, 0.03), "yes"),  # the bare loader waited in more steps
        ((0.05, 0.05), (0.02, 0.06), "NO"),
    ],
)
def test_echoes_are_at_most_one_percent_or_as_many_as_the_bare_loaders_waits(
    echoed: tuple[float, float], waited: tuple[float, float], met: str
) -> None:
    pairs = [pair(waited=ours, echoed=share) for ours, share in zip(waited, echoed, strict=True)]
    assert rules(pairs)["echoes, share of all examples"][-1] == met


@pytest.mark.parametrize(("times", "met"), [((19.0, 20.19, 25.0), "yes"), ((19.0, 20.21, 20.3), "NO")])
def test_the_median_pair_takes_at_most_one_percent_longer(times: tuple[float, ...], met: str) -> None:
    assert rules([pair(demand) for demand in times])["time / bare DataLoader"][-1] == met


def test_failures_come_first() -> None:
    assert next(iter(rules([pair(demand=21.0)]))) == "time / bare DataLoader"
