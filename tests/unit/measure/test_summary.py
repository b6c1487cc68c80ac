"""What people read at the end of a training: the summary's lines, and one sentence of advice for each situation."""

import ast
import re

import pytest

from lightning_echo.measure.advice import Waiting, advise
from lightning_echo.measure.control import Decision, Observation, PipelineCosts, Reason
from lightning_echo.measure.report import tables
from lightning_echo.measure.summary import EpochReport, RunSummary, RunVerdict, summarize
from lightning_echo.measure.target_idle import recommend


def report(epoch, factor=1.0, *, idle=0.5, steps=100, seconds=0.02, **values):
    """An epoch whose steps last ``seconds``, of which a share of ``idle`` is waited."""
    times = {"idle_fraction": idle, "data_wait_seconds": seconds * idle, "step_seconds": seconds * (1 - idle)}
    counts = {"fresh_examples": 800 * (epoch + 1), "echoed_examples": 0}
    return EpochReport(epoch, steps, factor, **{**counts, **times, **values})


VERDICT = RunVerdict("The advice.")


def lines_of(reports, verdict=VERDICT):
    """The lines after the verdict."""
    first, *others = summarize(reports, verdict).splitlines()
    assert first == "lightning_echo: The advice."
    return others


def said(report):
    """The last lines, about examples and what belongs to them, as one."""
    return " ".join(summarize([report], VERDICT).split())


def test_the_lines_after_the_verdict_say_where_the_time_went_and_with_which_factor():
    reports = [
        report(0, 1.0, idle=0.6, seconds=0.01, next_factor=3.0, message="a factor of 3 feeds it", first_batch_seconds=1.5),
        report(1, 3.0, idle=0.5, next_factor=3.0, message="not said", first_batch_seconds=0.5),
        report(2, 3.0, idle=0.0, steps=300, next_factor=1.5, message="a factor of 1.5 is enough"),
        report(3, 1.5, idle=0.0, next_factor=3.0, message="up again"),  # when the first batch came is not known
        report(4, 3.0, idle=0.0, next_factor=3.0, message="not said"),
    ]
    assert lines_of(reports)[:5] == [
        "  700 steps in 13 s: 11.4 s of work, 1.6 s waiting for input (idle 12%); 2 s more for first batches",
        "  epoch 0: factor 1, idle 60%; a factor of 3 feeds it",
        "  epochs 1 to 2: factor 3, idle 12%; a factor of 1.5 is enough",  # 1 of 8 s
        "  epoch 3: factor 1.5, idle 0%; up again",
        "  epoch 4: factor 3, idle 0%",
    ]


def test_long_times_and_large_counts_are_written_out_and_one_is_no_plural():
    (first, *_, counts) = lines_of([report(0, steps=1_000_000, fresh_examples=12_345_678, passes=1.0)])
    assert first.startswith("  1,000,000 steps in 20,000 s: 10,000 s of work, 10,000 s waiting")
    assert counts == "  12,345,678 fresh and 0 echoed examples, 1 pass over the data"
    assert lines_of([report(0, steps=1, idle=0.0)])[0].startswith("  1 step in 0.02 s")
    assert said(report(0, passes=2.5)).endswith(", 2.5 passes over the data")
    assert said(report(0)).endswith(" 800 fresh and 0 echoed examples")


RANK = "epoch 4: factor 2.5, idle 50%, slowest rank"
TIMES = "1.8 to 2.2 times as fast as with fresh examples alone"


@pytest.mark.parametrize(
    ("values", "told", "untold"),
    [
        ({"slowest_rank": 0}, f"{RANK} 0", "node"),
        ({"slowest_rank": 2, "slowest_node": 1}, f"{RANK} 2 (node 1)", TIMES),
        ({"slowest_rank": None}, "epoch 4: factor 2.5, idle 50% ", "slowest"),
        ({"speedup": (1.8, 2.2)}, TIMES, "cache"),
        ({"speedup": (1.8, 2.2), "factor": 1.0}, TIMES, "cache"),  # echoed before
    ],
)
def test_a_slow_rank_is_named_and_the_speed_up_told_where_there_was_echoing(values, told, untold):
    text = said(report(4, **{"factor": 2.5, **values}))
    assert told in text
    assert untold not in text


CACHED = {"cached_examples": 1200, "cache_bytes": 3 * 2**28, "cache_hold": "loaded", "cache_is_full": True}
FULL, ROOM = "nothing more fits", "there is room for more"
CAME = "of the last epoch's fresh examples came from it"


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"cache_hit_fraction": 0.5}, f"1,200 loaded examples in 768 MiB, {FULL}; 50% {CAME}"),
        ({"cache_hit_fraction": 0.0, "cache_is_full": False}, f"1,200 loaded examples in 768 MiB, {ROOM}; 0% {CAME}"),
        (
            {"cache_hit_fraction": 0.5, "cache_received_fraction": 0.25, "exchange_fraction": 0.9, "idle_fraction": 0.02},
            f"1,200 loaded examples in 768 MiB, {FULL}; 50% {CAME}, 25% from other nodes",
        ),
        (
            {"cache_hit_fraction": 1.0, "cache_received_fraction": 0.5, "exchange_fraction": 0.9, "idle_fraction": 0.6},
            f"1,200 loaded examples in 768 MiB, {FULL}; 100% {CAME}, 50% from other nodes; the nodes exchanged examples for "
            "90% of that epoch: the exchange, not the storage, is the limit",
        ),
    ],
)
def test_the_line_about_the_cache_says_what_it_holds_and_what_it_was_good_for_in_the_last_epoch(values, said):
    before = report(0, cached_examples=7, cache_bytes=7, cache_hold="loaded", cache_hit_fraction=0.9)
    text = summarize([before, report(1, **{**CACHED, **values})], VERDICT)
    assert " ".join(text.split()).endswith(f" echoed examples the cache holds {said}")


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"shared_trainings": 1}, "with no other training at the end of the last epoch"),
        ({"shared_trainings": 2, "peer_wait_fraction": 0.0}, "with 1 other training at the end of the last epoch"),
        (
            {"shared_trainings": 3, "saved_cpu_seconds": 41.26},
            "with 2 other trainings at the end of the last epoch; reading once for all saved this one 41.3 s of processor time",
        ),
        (
            {"shared_trainings": 4, "peer_wait_fraction": 0.25, "missed_examples": 1200, "slowest_training": "b.py (process 7)"},
            "with 3 other trainings at the end of the last epoch; 25% of the last epoch waited for a slower one, most of all "
            "b.py (process 7); 1,200 examples were missed",
        ),
        (
            {"shared_trainings": 1, "missed_examples": 0, "read_again_examples": 1300},
            "with no other training at the end of the last epoch; 1,300 were read again for it, as it came late",
        ),
    ],
)
def test_the_line_about_sharing_says_with_how_many_and_what_that_cost(values, said):
    text = summarize([report(0, **values)], VERDICT)
    assert " ".join(text.split()).endswith(f" echoed examples the reading was shared {said}")
    without = summarize([report(0)], VERDICT)
    assert "shared" not in without
    assert "cache" not in without


def test_what_was_not_measured_is_not_said():
    unknown = EpochReport(0, 0, 1.0, fresh_examples=8, echoed_examples=0)
    assert lines_of([unknown]) == [
        "  the time that steps waited for input could not be measured",
        "  epoch 0: factor 1",
        "  8 fresh and 0 echoed examples",
    ]
    assert lines_of([]) == ["  no epoch was measured"]


def test_the_verdict_comes_first_then_why_then_what_to_paste():
    verdict = RunVerdict("Echo with factor 2.", ("idle 50%", "each step: 10 ms compute", "x"), "EchoCallback(factor=2)")
    assert summarize([report(0)], verdict).splitlines()[:4] == [
        "lightning_echo: Echo with factor 2.",
        "  why: idle 50%; each step: 10 ms compute; x",
        "  next: EchoCallback(factor=2)",
        "  100 steps in 2 s: 1 s of work, 1 s waiting for input (idle 50%); 0 s more for first batches",
    ]


def test_no_line_is_longer_than_120_columns():
    long = (
        "idle 60%, target 5%: the work after the insertion point takes 17.5 ms per batch by itself, a step 10 ms; "
        "echo at insertion_point="
    )
    reports = [report(epoch, 1.0 + epoch, steps=10**9, next_factor=9.0, message=long * 2) for epoch in range(3)]
    lines = summarize(reports, RunVerdict(long * 3, (long, long), "")).splitlines()
    assert max(map(len, lines)) <= 120
    assert " ".join("\n".join(lines).split()).startswith("lightning_echo: " + " ".join((long * 3).split()))
    assert all(line.startswith("  ") for line in lines[1:])
    assert sum(not line.startswith("   ") for line in lines) == 1 + 1 + 1 + 3 + 1  # what goes on is further in


BUSY, LAST = "the accelerator is busy", " (last 100 steps)"
HALF = f"{BUSY} only 50% of the time{LAST}"
SLOW_READS = "if single reads are far slower than the others, a larger prefetch_factor or more workers help"


def costs(source, *, rest=0.0, collate=0.0, point="after_augmentation", workers=2):
    """With 10 ms of work per step."""
    return PipelineCosts(point, source, rest, collate, device_seconds=0.01, workers=workers)


MORE = "; a faster data source would help more"
RARELY = f"{MORE}; a larger factor rarely does."
WORTH = "and fresh examples are worth more than echoed ones."
LITTLE = f", and a larger factor brings too little; {SLOW_READS}."
WORKERS = "Set num_workers to 1 or more first, since with 0 loading and training take turns"

SITUATIONS = {  # name: factor, costs, what is recommended, the advice expected, and the line to paste
    "busy": (1, costs(0.01), (1, Reason.fits), f"Do not echo: {BUSY} 100% of the time{LAST}.", ""),
    "well echoed": (3.3, costs(0.06), (3.3, Reason.fits), f"Keep factor 3.3: {BUSY} 100% of the time{LAST}.", ""),
    "starved": (
        *(1, costs(0.04), (2.09, Reason.starved)),
        f"Echo with factor 2.09, about 2 times as fast: {BUSY} only 50% of the time{LAST}.",
        "EchoCallback(factor=2.09)",
    ),
    "starved at a factor": (
        *(1.5, costs(0.06), (3.14, Reason.starved)),
        f"Raise the factor to 3.14, about 2 times as fast: {BUSY} only 50% of the time{LAST}.",
        "EchoCallback(factor=3.14)",
    ),
    "starved, but not enough to tell by how much": (
        *(1, costs(0.0206), (1.13, Reason.starved)),
        f"Echo with factor 1.13: {BUSY} only 97% of the time{LAST}.",
        "EchoCallback(factor=1.13)",
    ),
    "a cheaper source": (
        *(4, costs(0.04), (2.09, Reason.cheaper_source)),
        f"Lower the factor to 2.09: that is enough to feed the accelerator, {WORTH}",
        "EchoCallback(factor=2.09)",
    ),
    "a source that needs no echo": (
        *(4, costs(0.01), (1, Reason.cheaper_source)),
        "Do not echo: fresh examples alone feed the accelerator, and are worth more than echoed ones.",
        "EchoCallback()",
    ),
    "at the maximum, from below": (
        *(1, costs(0.2), (8, Reason.at_maximum)),
        f"Echo with factor 8, about 8 times as fast: {BUSY} only 10% of the time{LAST}{RARELY}",
        "EchoCallback(factor=8)",
    ),
    "at the maximum": (
        *(8, costs(0.2), (8, Reason.at_maximum)),  # 100 ms / 8 for a step of 10 ms
        *(f"Keep factor 8: {BUSY} 80% of the time{LAST}{RARELY}", ""),
    ),
    "over the maximum": (
        *(16, costs(0.2), (8, Reason.at_maximum)),
        *("Lower the factor to 8: a larger one is seldom worth it.", "EchoCallback(factor=8)"),
    ),
    "at the minimum, from above": (
        *(4, costs(0.01), (3, Reason.at_minimum)),
        *(f"Lower the factor to 3: that is enough to feed the accelerator, {WORTH}", "EchoCallback(factor=3)"),
    ),
    "at the minimum": (3, costs(0.01), (3, Reason.at_minimum), f"Keep factor 3: {BUSY} 100% of the time{LAST}.", ""),
    "under the minimum": (
        *(1, None, (2, Reason.at_minimum)),
        f"Echo with factor 2, since min_factor allows no smaller one: {BUSY} 100% of the time{LAST}.",
        "EchoCallback(factor=2)",
    ),
    "too slow after the echo": (
        *(2, costs(0.01, rest=0.04), (2, Reason.downstream_too_slow)),
        *(f"At this insertion point no factor is enough; the message{LAST}.", ""),
    ),
    "too slow after the echo, and a factor gains": (  # 60 + 20 ms; 60 / 4 + 20 = 35
        *(1, costs(0.06, rest=0.02), (4, Reason.downstream_too_slow)),
        f"Echo with factor 4, about 2.3 times as fast: at this insertion point no factor is enough; the message{LAST}.",
        "EchoCallback(factor=4)",
    ),
    "a plain loader, of which no stage is known": (
        *(1, PipelineCosts.of_waiting(0.04, 0.75, 1.0), (4, Reason.starved)),
        f"Echo with factor 4, up to 4 times as fast: {BUSY} only 25% of the time{LAST}; what is augmented and collated again for "
        "echoes is not known of a plain loader, and makes the gain smaller.",
        "EchoCallback(factor=4)",
    ),
    "a larger factor brought too little": (
        *(2.5, costs(0.06), (2.5, Reason.no_gain)),
        *(f"Keep factor 2.5: {BUSY} 83% of the time{LAST}{LITTLE}", ""),
    ),
    "a larger factor brings too little": (
        *(4, costs(0.1), (2.5, Reason.no_gain)),
        *(f"Lower the factor to 2.5: {BUSY} 80% of the time{LAST}{LITTLE}", "EchoCallback(factor=2.5)"),
    ),
    "no factor brings anything": (
        *(1, costs(0.025), (1, Reason.no_gain)),
        *(f"Do not echo: {BUSY} 80% of the time{LAST}{LITTLE}", ""),
    ),
    "a larger factor brought too little, but not this one": (
        *(1, costs(0.06), (2, Reason.no_gain)),
        f"Echo with factor 2, about 2 times as fast: {BUSY} only 33% of the time{LAST}{LITTLE}",
        "EchoCallback(factor=2)",
    ),
    "no workers": (
        *(1, costs(0.03, collate=0.01, workers=0), (1, Reason.no_workers)),
        *(f"{WORKERS}: {BUSY} 20% of the time{LAST}.", "num_workers=1"),
    ),
    "not measured": (2, costs(0.04), (2, Reason.not_measured), f"No advice: the message{LAST}.", ""),
}


def observed(factor, costs):
    """What would be seen if the model of the costs were right."""
    idle, seconds = (0.0, 0.01) if costs is None else (costs.idle_fraction(factor), costs.step_seconds(factor))
    return Observation(epoch=5, factor=factor, steps=100, idle_fraction=idle, step_seconds=seconds, costs=costs)


def test_a_plain_loader_whose_workers_are_ahead_is_not_what_steps_wait_for():
    """A step of 12.5 ms waits for 2.5. If workers have nothing to do for 60% of the time, they need 5 ms for a batch."""
    for no_request, message in (
        (0.6, "Do not echo: the accelerator is busy 80% of the time (last 100 steps); it does not wait for loading, since the "),
        (
            0.0,
            "Echo with factor 1.28, up to 1.2 times as fast: the accelerator is busy only 80% of the time",
        ),  # 1.25 * 0.95 * 1.07
        (0.05, "Echo with factor "),  # as chance may have it
    ):
        its_costs = PipelineCosts.of_waiting(0.0125, 0.2, 1.0, no_request=no_request)
        seen = Observation(epoch=0, factor=1.0, steps=100, idle_fraction=0.2, step_seconds=0.0125, costs=its_costs)
        assert advise(seen, recommend(seen)).message.startswith(message)


@pytest.mark.parametrize("situation", SITUATIONS)
def test_advice_is_a_sentence_and_a_line_to_paste_where_something_changes(situation):
    factor, its_costs, (recommended, reason), message, line = SITUATIONS[situation]
    found = advise(observed(factor, its_costs), Decision(recommended, reason, "the message"))
    assert (found.message, found.next_line) == (message, line)
    assert (found.message[-1], found.message.count(". ")) == (".", 0), "one sentence"
    ast.parse(line)


@pytest.mark.parametrize(
    ("chosen", "recommended", "line"),
    [
        ({"cache": "1MiB"}, 2.09, 'EchoCallback(factor=2.09, cache="1MiB")'),
        ({"factor": 4, "reuse": "each", "buffer_size": 64}, 2.09, 'EchoCallback(factor=2.09, reuse="each", buffer_size=64)'),
        ({"cache": {"size": "1MiB", "hold": "raw"}}, 2, 'EchoCallback(factor=2, cache={"size": "1MiB", "hold": "raw"})'),
        ({"factor": 4, "reuse": "each", "share": "sweep"}, 1, 'EchoCallback(share="sweep")'),
    ],
)
def test_what_to_paste_keeps_the_options_that_the_user_has_chosen(chosen, recommended, line):
    seen = observed(chosen.get("factor", 1), costs(0.04))
    assert advise(seen, Decision(recommended, Reason.starved, ""), 2, chosen).next_line == line


def waited(fraction, may_read_ahead=True, reason=Reason.starved, factor=1, recommended=2.09, chosen=None):
    found = advise(observed(factor, costs(0.04)), Decision(recommended, reason, ""), 2, chosen, Waiting(fraction, may_read_ahead))
    return found.message, found.next_line


def test_if_the_workers_mostly_wait_reads_in_flight_come_first():
    message, line = waited(0.92, chosen={"cache": "1MiB"})
    assert message == (
        f"Set reads_in_flight to 64, if threads may read the data set, up to 2 times as fast: {BUSY} only 50% of the time{LAST}, "
        "and the workers wait 92% of theirs, rather than compute."
    )
    assert line == 'EchoCallback(cache="1MiB", factor=1, reads_in_flight=64)'
    message, line = waited(0.92, chosen={"reads_in_flight": 4})
    assert message.startswith("Echo with factor 2.09")  # threads may read already
    message, line = waited(0.92, may_read_ahead=False)
    assert message.endswith("; the workers wait 92% of their time: the doctor says what reads_in_flight needs here.")
    assert line == "EchoCallback(factor=2.09)"
    known = Waiting(0.92, may_read_ahead=False, cached_fraction=None)
    message = advise(observed(1, costs(0.04)), Decision(2.09, Reason.starved, ""), 2, {}, known).message
    assert message.startswith("Keep examples in a cache, ")
    assert message.endswith("; the workers wait 92% of their time: the doctor says what reads_in_flight needs here.")


READS, ECHO = "EchoCallback(factor=1, reads_in_flight=64)", "EchoCallback(factor=2.09)"
CACHE = "EchoCallback(cache=0.5)"
CLUSTER = 'EchoCallback(share={"name": "train", "cluster": "ray", "cluster_workers": 26})'
LATER = "from the second pass on"


@pytest.mark.parametrize(
    ("known", "cores", "lines"),
    [
        # What is not possible is not named: all cores have a worker, the data cannot be cached, threads may not read.
        ({}, 2, [ECHO]),
        ({"cached_fraction": 0.0, "fraction": None}, 2, [ECHO]),
        ({"workers": 0}, 8, [ECHO]),  # how many they are is not known
        # Two workers take 20 ms for a batch, for steps of 10 ms.
        ({}, 8, ["num_workers=4", ECHO]),
        ({}, 3, ["num_workers=3", ECHO]),
        ({"fraction": 0.8, "may_read_ahead": True}, 8, ["num_workers=4", READS, ECHO]),
        ({"fraction": 0.6, "may_read_ahead": True, "cached_fraction": None}, 2, [READS, CACHE, ECHO]),
        ({"fraction": 0.1, "may_read_ahead": True, "cached_fraction": 0.5}, 2, [CACHE, ECHO]),
        ({"cached_fraction": 0.02}, 2, [ECHO]),  # that little would not be noticed
    ],
)
def test_each_remedy_is_advised_in_its_order_and_only_where_it_is_possible_and_helps(known, cores, lines):
    waiting = Waiting(**{"fraction": 0.0, "may_read_ahead": False, "workers": 2, **known})
    seen = observed(1, costs(0.04, point="before_augmentation"))
    verdict = advise(seen, Decision(2.09, Reason.starved, ""), cores, None, waiting)
    assert [verdict.next_line, *(other.partition(", about")[0].partition(", up to")[0] for other in verdict.others)] == lines
    assert "come before echoing" not in verdict.message
    assert verdict.message.startswith("Echo with") is (lines == [ECHO])


@pytest.mark.parametrize(
    ("its_costs", "known", "cores", "message", "others"),
    [
        # 20 ms of two workers are 13.3 ms of three.
        (
            *(costs(0.04), {}, 3),
            f"Set num_workers to 3, about 1.5 times as fast: {HALF}, and there are 3 cores for 2 workers.",
            (f"{ECHO}, about 2 times as fast",),
        ),
        # Of 80 ms, the cache of half of the data saves 30: 25 ms in place of 40.
        (
            *(costs(0.06, rest=0.02, point="before_augmentation"), {"cached_fraction": 0.5}, 2),
            f"Keep examples in a cache, up to 1.6 times as fast {LATER}: {BUSY} only 25% of the time{LAST}, and half of the free "
            "memory holds 50% of the data.",
            (f"{ECHO}, about 1.6 times as fast",),  # 80 ms become 48.7
        ),
        # How much of the time would be saved, and what memory holds, is not known: at most all of it.
        (
            *(costs(0.04), {"cached_fraction": None}, 2),
            f"Keep examples in a cache, up to 2 times as fast {LATER}: {HALF}, and what it holds is not read again.",
            (f"{ECHO}, about 2 times as fast",),
        ),
    ],
)
def test_the_first_remedy_is_the_verdict_with_its_gain_and_the_others_follow_with_theirs(
    its_costs, known, cores, message, others
):
    waiting = Waiting(**{"fraction": 0.0, "may_read_ahead": False, "workers": 2, **known})
    verdict = advise(observed(1, its_costs), Decision(2.09, Reason.starved, ""), cores, None, waiting)
    assert (verdict.message, verdict.others) == (message, others)
    assert f"  then: {'; '.join(others)}" in summarize([], verdict)


@pytest.mark.parametrize("chosen", [{"cache": "1MiB"}, {"share": "sweep"}])
def test_a_cache_is_not_advised_to_a_run_that_has_one_or_whose_reader_would(chosen):
    known = Waiting(0.0, may_read_ahead=False, workers=2, cached_fraction=None)
    verdict = advise(observed(1, costs(0.04)), Decision(2.09, Reason.starved, ""), 2, chosen, known)
    assert verdict.message.startswith("Echo with factor 2.09")
    assert verdict.others == ()


def test_at_a_factor_that_may_not_rise_other_remedies_are_advised_and_no_line_repeats_the_factor():
    waiting = Waiting(0.0, may_read_ahead=False, workers=2)
    verdict = advise(observed(8, costs(0.2)), Decision(8, Reason.at_maximum, ""), 8, {"factor": 8}, waiting)
    assert verdict.message.startswith("Set num_workers to 3, about 1.2 times as fast: ")
    assert (verdict.next_line, verdict.others) == ("num_workers=3", ())


def test_workers_of_a_cluster_are_advised_before_echoing_if_there_is_one_and_the_cores_here_are_the_limit():
    waiting = Waiting(0.0, may_read_ahead=False, workers=16, batch_size=8, has_cluster=True)
    verdict = advise(observed(1, PLAIN), Decision(2.09, Reason.starved, ""), 16, None, waiting)
    assert verdict.message == (
        f"Take 26 workers of the cluster, about 2.6 times as fast: {BUSY} only 38% of the time{LAST}, and the 16 cores here are "
        "the limit."
    )
    assert verdict.next_line == CLUSTER
    shares = advise(observed(1, PLAIN), Decision(2.09, Reason.starved, ""), 16, {"share": "sweep"}, waiting)
    assert shares.next_line == 'EchoCallback(factor=2.09, share="sweep")'


@pytest.mark.parametrize(
    "changes",
    [
        {"fraction": 0.4},
        {"recommended": 1, "reason": Reason.fits},
        {"recommended": 1, "reason": Reason.no_workers},
    ],
)
def test_reads_in_flight_are_not_advised_to_a_run_that_is_fed_or_whose_workers_compute(changes):
    assert "reads_in_flight" not in "".join(waited(**{"fraction": 0.92, **changes}))


def told_elsewhere(its_costs, fraction=0.0, cores=16, reason=Reason.starved, chosen=None, **waiting):
    """What a run of 16 workers with batches of 8 is told: cores that are needed, and there; cores elsewhere, and in all."""
    known = Waiting(fraction, **{"may_read_ahead": False, "workers": 16, "batch_size": 8, **waiting})
    message = advise(observed(1, its_costs), Decision(8, reason, "why"), cores, chosen, known).message
    words = (
        r"takes (\d+) cores, and .* has (\d+): (\d+) on other machines.* would do, with ShareConfig\(.*cluster_workers=(\d+)\)\.$"
    )
    found = re.search(words, message)
    assert (found is None) is ("other machines" not in message)
    return None if found is None else tuple(map(int, found.groups()))


STARVED = costs(0.23, workers=16)  # 230 ms for a batch, in steps of 10 ms
PLAIN = PipelineCosts.of_waiting(0.01625, 10 / 16.25, 1.0, workers=16)  # a run without echoing: 6.25 of 16.25 ms are its work


@pytest.mark.parametrize(
    ("seen", "told"),
    [
        # Half a millisecond for each example of a batch from elsewhere is 4 ms: (230 - 16 * 10.53) / 226 = 27% of them must come,
        # from at least 0.27 * 230 / 10.53 = 6 workers.
        ({}, (23, 16, 7, 7)),
        ({"its_costs": costs(0.22, collate=0.01, workers=16)}, (23, 16, 7, 7)),
        ({"its_costs": costs(0.03, rest=0.2, workers=16), "reason": Reason.downstream_too_slow}, (23, 16, 7, 7)),
        ({"reason": Reason.at_maximum}, (23, 16, 7, 7)),
        # Eight workers need 160 ms for a batch: 16 cores are enough, half as many are not.
        ({"its_costs": costs(0.16, workers=8), "workers": 8}, None),
        ({"its_costs": costs(0.16, workers=8), "workers": 8, "cores": 8}, (16, 8, 8, 8)),
        # 32 workers take turns on 16 cores: half of 460 ms.
        ({"its_costs": costs(0.46, workers=32), "workers": 32}, (23, 16, 7, 7)),
        ({"fraction": 0.3}, None),  # 161 ms of processor time
        ({"fraction": 0.2}, (19, 16, 3, 3)),  # 184: (184 - 168.4) / 180 = 9% from elsewhere, where 0.09 * 230 / 10.53 = 1.9
        # One thread takes in what all ranks need, 27% of 4 ms a step for each: 43 ms for 40 of them.
        ({"ranks": 4}, (23, 16, 7, 28)),
        ({"ranks": 40}, None),
        ({"its_costs": PLAIN}, (42, 16, 26, 26)),  # 16.25 ms of 16 workers: 260 ms for steps of 6.25 ms
        ({"reason": Reason.no_gain}, None),  # the cost model does not explain the waiting
        ({"its_costs": costs(0.15, workers=16)}, None),
        ({"batch_size": 0}, None),  # a stream
        # 100 ms for a batch of 64 examples, 32 from elsewhere: (100 - 84.2) / 68 = 23% of them, where 0.23 * 100 / 10.53 = 2.2.
        ({"its_costs": costs(0.1, workers=8), "workers": 8, "cores": 8, "batch_size": 64}, (10, 8, 3, 3)),
        ({"its_costs": costs(0.6, workers=16), "fraction": 0.6}, None),  # 240 ms of processor time, but workers mostly wait
        ({"batch_size": 500}, None),  # 250 ms to take in, which is more than to make
        ({"chosen": {"share": "sweep"}}, None),
        ({"its_costs": None, "reason": Reason.at_minimum}, None),
        ({"fraction": 0.9, "may_read_ahead": True}, None),  # it waits: reads in flight are advised
    ],
)
def test_cores_of_other_machines_are_named_if_processors_are_the_limit_and_too_few(seen, told):
    assert told_elsewhere(**{"its_costs": STARVED, **seen}) == told


def test_what_waits_is_not_known_of_every_run_and_then_no_cores_are_named():
    assert "other machines" not in advise(observed(1, STARVED), Decision(8, Reason.starved, ""), 16).message
    without_workers = observed(1, costs(0.23, workers=0))
    known = Waiting(0.0, may_read_ahead=False, workers=0, batch_size=8)
    assert "other machines" not in advise(without_workers, Decision(1, Reason.no_workers, ""), 16, None, known).message


@pytest.mark.parametrize(("source", "cores", "workers"), [(0.04, 8, 4), (0.041, 8, 5), (0.04, 2, 2), (0.004, 8, 1)])
def test_without_workers_as_many_are_advised_as_keep_up_with_a_step_of_10_ms_and_no_more_than_cores(source, cores, workers):
    verdict = advise(observed(1, costs(source, workers=0)), Decision(1, Reason.no_workers, ""), cores)
    assert verdict.next_line == f"num_workers={workers}"
    assert verdict.message.startswith(f"Set num_workers to {workers} or more first, ")


def test_three_figures_say_why():
    starved = observed(1, costs(0.04))  # two workers: a batch every 20 ms
    assert advise(starved, Decision(2.09, Reason.starved, "")).why == (
        "idle 50% (last 100 steps)",
        "each step: 10 ms compute, 10 ms waiting for data",
        "loading a batch of fresh examples takes 20 ms",
    )
    assert advise(observed(2, None), Decision(2, Reason.fits, "")).why == (
        "idle 0% (last 100 steps)",
        "each step: 10 ms compute, 0 ms waiting for data",
        "the echo factor was 2",
    )


def test_every_reason_that_a_recommendation_may_have_has_its_advice():
    reasons = {reason for _, _, (_, reason), _, _ in SITUATIONS.values()}
    assert reasons == {reason for reason in Reason if reason.is_measured} | {Reason.not_measured}


@pytest.mark.parametrize(
    ("its_costs", "factor", "reason", "said"),
    [
        # The model says 12 ms for the host, a step was measured to take 20 ms: of these 10 are waited.
        (costs(0.024), 2.09, Reason.starved, "Echo with factor 2.09, about 2 times as fast: "),
        (None, 2, Reason.starved, f"Echo with factor 2: {BUSY} only 50% of the time (last 50 steps)."),
        # The model takes the host for slower than it was: never a loss.
        (costs(0.2), 4, Reason.at_maximum, "Echo with factor 4, about 4 times as fast: "),
    ],
)
def test_what_echoing_would_gain_is_told_from_the_measured_step_and_not_without_costs(its_costs, factor, reason, said):
    seen = Observation(epoch=0, factor=1.0, steps=50, idle_fraction=0.5, step_seconds=0.02, costs=its_costs)
    assert advise(seen, Decision(factor, reason, "")).message.startswith(said)


def test_an_epoch_in_which_the_factor_rose_is_not_labelled_with_the_last_one_alone():
    """`TargetIdle` raises the factor within the first epoch, after 10, 20, 40, ... steps."""
    begun, later = report(0, 5.0, idle=0.0, effective_factor=2.0), report(1, 5.0, idle=0.0, effective_factor=4.9)
    assert "  epoch 0: factor 5 at the end, 2 uses per fresh example, idle 0%" in lines_of([begun])
    assert "  epoch 1: factor 5, idle 0%" in lines_of([later])
    told = "The factor is the one at the end of the epoch"
    assert [any(told in remark for remark in tables(RunSummary([each]))[0].remarks) for each in (begun, later)] == [True, False]


def test_it_says_in_how_many_epochs_other_programs_had_the_cores():
    sentence = "Other programs took 1.5 of 2 cores"
    reports = [EpochReport(number, 10, 1.0, 80, 0, load=load) for number, load in enumerate(["", sentence, ""])]
    verdict = RunVerdict("Do nothing.", ("idle 1%",), "EchoCallback()")
    lines = summarize(reports, verdict).splitlines()
    assert lines[1:4] == ["  why: idle 1%", "  next: EchoCallback()", f"  {sentence} (so in 1 of 3 epochs)"]
    assert f"  {sentence}" in summarize([reports[1]], verdict).splitlines()
    assert "programs" not in summarize([reports[0], reports[2]], verdict)
