"""Findings as text and as a document."""

import json

import pytest

from lightning_echo.doctor.machine import Status, as_document, as_text, error, ok, warning, worst

FINE, SLOW, WRONG = (
    ok("cores", "2 cores.", cores=2.0),
    warning("workers", "No worker.", "Add one."),
    error("loader", "Empty.", "Fill it."),
)


@pytest.mark.parametrize(
    ("findings", "status"), [([], "ok"), ([FINE], "ok"), ([SLOW, FINE], "warning"), ([FINE, WRONG, SLOW], "error")]
)
def test_the_worst_finding_counts(findings, status):
    assert worst(findings) is Status(status)


def test_the_text_names_what_each_finding_is_about_its_status_and_its_way_out():
    lines = as_text([FINE, SLOW, WRONG]).splitlines()
    assert lines == [
        "machine",
        "  ok      2 cores.",
        "  warning No worker.",
        "          Add one.",
        "  error   Empty.",
        "          Fill it.",
        "",
        "1 error, 1 warning",
    ]


def test_long_sentences_are_wrapped_and_lose_no_word():
    sentence = " ".join(f"word{number}" for number in range(60)) + "."
    text = as_text([ok("cores", sentence)])
    assert max(map(len, text.splitlines())) <= 110
    assert sentence in " ".join(text.split())


def test_the_document_has_a_version_the_worst_status_and_all_fields():
    document = json.loads(as_document([FINE, SLOW]))
    assert document["lightning_echo_doctor"] == 1
    assert document["status"] == "warning"
    assert document["findings"] == [
        {"about": "machine", "name": "cores", "status": "ok", "sentence": "2 cores.", "way_out": "", "figures": {"cores": 2.0}},
        {
            "about": "machine",
            "name": "workers",
            "status": "warning",
            "sentence": "No worker.",
            "way_out": "Add one.",
            "figures": {},
        },
    ]
