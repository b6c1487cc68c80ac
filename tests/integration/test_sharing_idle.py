"""Several loaders of one name, one after the other in one process: none of them waits for one that is idle."""

import threading

import pytest
from sharing_runs import Numbers, epochs_of, indices, loader_of

LENGTH = 240


pytestmark = pytest.mark.usefixtures("own_folder")


def in_thread(run):
    """What a function returns that runs in a thread, which has ended then."""
    found = []
    thread = threading.Thread(target=lambda: found.append(run()), daemon=True)
    thread.start()
    thread.join(60)
    assert found, "it waits"
    return found[0]


def test_a_loader_whose_loop_has_ended_holds_up_no_other_one_and_all_get_whole_passes():
    first, second = [loader_of(Numbers(LENGTH), size, window=2**13, linger_seconds=5) for size in (8, 16)]
    passes = [in_thread(lambda: epochs_of(first, 1)[0])]  # in a thread, so that a test that hangs fails

    def rest():
        return [epochs_of(each, 1)[0] for each in (second, first, second)]

    passes += in_thread(rest)
    for loader in (first, second):
        loader.close()
    ordered = [indices(epoch) for epoch in passes]
    for order in ordered:
        assert sorted(order) == list(range(LENGTH))
    assert ordered[0] == ordered[1] != ordered[2] == ordered[3], "each loader goes from pass to pass"


def test_a_loader_whose_loop_was_left_holds_up_no_other_one():
    first, second = [loader_of(Numbers(LENGTH), 8, window=2**13, linger_seconds=5) for _ in range(2)]
    in_thread(lambda: next(iter(first)))
    (epoch,) = in_thread(lambda: epochs_of(second, 1))
    for loader in (first, second):
        loader.close()
    assert sorted(indices(epoch)) == list(range(LENGTH))


def test_two_loaders_that_are_iterated_together_stay_together():
    """The second one comes a few batches later than the first, and loses nothing from then on."""

    def run():
        both = [loader_of(Numbers(LENGTH), 8, window=2**13, linger_seconds=5) for _ in range(2)]
        batches = [pair for _ in range(3) for pair in zip(*both, strict=True)]
        for loader in both:
            loader.close()
        return [[index for batch in of_one for index in batch["index"].tolist()] for of_one in zip(*batches, strict=True)]

    first, second = in_thread(run)
    for number in range(3):
        assert sorted(first[number * LENGTH : (number + 1) * LENGTH]) == list(range(LENGTH))
    late = next(place for place in range(LENGTH) if first[place : place + LENGTH] == second[:LENGTH])
    assert first[late:] == second[: len(first) - late]
