"""A table as text: figures at the right, long words in several lines. The rest is tested where a report is shown."""

from lightning_echo.measure.page import Table, as_block, as_sentence, as_text


def test_figures_stand_under_the_end_of_their_heading():
    lines = as_text(Table("Rates", ("what", "examples/s"), (("run", "7"), ("loader", "1,000")))).splitlines()
    assert {len(line) for line in lines[1:]} == {len(lines[1])}
    assert [line.split()[-1] for line in lines[1:]] == ["examples/s", "7", "1,000"]


def test_a_bar_is_as_long_as_the_share():
    lines = as_text(Table("Parts", ("", "ms"), (("step", "1"), ("wait", "2")), shares=(1 / 3, 2 / 3))).splitlines()
    assert [line.count("#") for line in lines] == [0, 0, 10, 20]


def test_long_words_go_on_in_the_next_line_and_nothing_is_lost():
    words = " ".join(f"word{number}" for number in range(60))
    text = as_text(Table("Names", ("", "ms"), ((words, "5"),)))
    assert max(map(len, text.splitlines())) <= 100
    assert sorted(text.split()) == sorted(["Names", "ms", "5", *words.split()])


def test_a_block_without_sentences_is_nothing():
    assert as_block("Why", []) == ""
    assert as_block("Why", ["a", "b"]) == "Why\n  a\n  b"
    assert as_sentence("a") == "  a"
