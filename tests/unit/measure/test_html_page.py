"""A page: what is given is shown in its order, as text, and what is empty leaves nothing behind."""

from lightning_echo.measure.page import HtmlPage, Table

BARE = HtmlPage("A & B", "<svg></svg>", "two lines", ())


def test_the_verdict_comes_before_the_figure_and_the_figure_before_the_tables():
    table = Table("Epochs", ("epoch", "idle"), (("0", "5%"),), ("A remark.",))
    page = HtmlPage("Head", "<svg></svg>", "lines", (table,), "Echo.", ("one", "two"), ("EchoCallback(factor=2)",), ("A note.",))
    text = page.text()
    order = ["<h1>Head", "Echo.", "one", "two", "<code>EchoCallback(factor=2)", "<svg>", "Epochs", "5%", "A remark.", "A note."]
    places = [text.index(words) for words in order]
    assert places == sorted(places)


def test_what_is_empty_is_left_out():
    text = BARE.text()
    for words in ('class="verdict"', 'class="why"', "Next", "<table", "Notes", "<li>"):
        assert words not in text
    assert "<svg></svg>" in text


def test_what_would_be_a_tag_is_shown_as_text():
    name = "<script>$figure</script>"
    table = Table(name, (name,), ((name,),), (name,))
    text = HtmlPage(name, "<svg></svg>", f'"{name}', (table,), name, (name,), (name,), (name,)).text()
    assert "<script" not in text
    assert text.count("&lt;script&gt;$figure&lt;/script&gt;") == 11  # the headline twice, the words of the figure, and 8 texts
    assert 'aria-label="&quot;' in text


def test_a_column_of_numbers_takes_no_more_room_than_it_needs():
    numbers = HtmlPage("", "", "", (Table("", ("epoch", "idle"), (("0", "5%"), ("1,000", "5%"))),)).text()
    words = HtmlPage("", "", "", (Table("", ("why", "idle"), (("0", "5%"), ("at the beginning", "5%"))),)).text()
    assert '<table class="numbered">' in numbers
    assert "<table>" in words
