"""What the package says to its users, read in a row: errors, warnings, and lines of the log.

``pytest -s tests/unit/test_messages.py -k printed`` prints all of them. A field of an f-string is shown as ``{name}``, a text
that is put together elsewhere as ``{call(...)}``. The other tests check the rules that every message keeps: which argument, what
was expected, what came, the way out.
"""

import ast
import re
from pathlib import Path
from typing import NamedTuple

import pytest

import lightning_echo

ROOT = Path(lightning_echo.__file__).parent
WARNS = {"warn", "rank_zero_warn"}
INFORMS = {"rank_zero_info"}
LOGS = {"LOGGER.info", "LOGGER.warning", "LOGGER.error", "LOGGER.debug"}
# They end something, are caught in the package, and are never seen: they need no text.
CONTROL_FLOW = {"Closed", "NextReader", "OrdersDifferError", "PassOver"}
# Python's own protocols, and methods that a subclass of ours has.
PROTOCOLS = {"StopIteration", "NotImplementedError"}
# Begin with a name that has a capital letter, which is no beginning of a sentence.
NAMES = r"(CachedDataset|StagedDataset|EchoCallback|EchoDataModule|EchoLoader|Decision|StopIteration|Trainer)\b"


class Message(NamedTuple):
    """A place in the package that says something.

    Attributes:
        place: File and line.
        kind: The name of the exception, or of the function that warns or logs.
        text: What is said.
        call: The call in the source.
    """

    place: str
    kind: str
    text: str
    call: ast.Call


def text_of(node: ast.expr) -> str:
    """The text of an expression, with its fields in braces."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(map(text_of, node.values))
    if isinstance(node, ast.FormattedValue):
        return f"{{{ast.unparse(node.value)}}}"
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return text_of(node.left) + text_of(node.right)
    return f"{{{ast.unparse(node)}}}"


def messages_of(source: str, name: str) -> list[Message]:
    """All messages of a file, in the order of their lines."""
    found = []
    for node in ast.walk(ast.parse(source)):
        call = node.exc if isinstance(node, ast.Raise) else node
        if isinstance(node, ast.Raise) and isinstance(call, ast.Name) and call.id[0].isupper():
            call = ast.copy_location(ast.Call(call, [], []), call)  # ``raise ValueError`` is ``raise ValueError()``
        if not isinstance(call, ast.Call):
            continue
        kind = ast.unparse(call.func)
        says = kind in LOGS or kind.split(".")[-1] in WARNS | INFORMS
        if isinstance(node, ast.Raise) or (says and isinstance(node, ast.Call)):
            text = text_of(call.args[0]) if call.args else ""
            found.append(Message(f"{name}:{call.lineno}", kind, text, call))
    return sorted(found, key=lambda message: message.call.lineno)


ALL = [each for path in sorted(ROOT.rglob("*.py")) for each in messages_of(path.read_text(), str(path.relative_to(ROOT)))]
ERRORS = [each for each in ALL if re.fullmatch(r"[A-Z]\w+", each.kind)]
TOLD = [each for each in ALL if each.kind in ("warnings.warn", "rank_zero_warn", "rank_zero_info")]
LOGGED = [each for each in ALL if each.kind in LOGS]


def wordless(messages: list[Message]) -> list[Message]:
    """Errors without a text, though somebody may see them."""
    return [each for each in messages if not each.text and each.kind not in CONTROL_FLOW | PROTOCOLS]


def without_value(messages: list[Message]) -> list[Message]:
    """Errors about a value that do not say which value came: neither after "got", nor anywhere in the sentence."""
    about = [
        each for each in messages if each.kind in ("TypeError", "ValueError") and re.search(r"\bmust (be|have|map)\b", each.text)
    ]
    return [each for each in about if " got " not in each.text and "{" not in each.text]


def untidy(messages: list[Message]) -> list[Message]:
    """Messages that end in a full stop or a blank, or have two stops or blanks in a row."""
    return [each for each in messages if re.search(r"[.\s]$|(?<![.\s])\.\.(?!\.)|\S  |\.\.\.\.", each.text)]


def capitalised(messages: list[Message]) -> list[Message]:
    """Messages that begin like a sentence: they stand behind the name of an error, or behind ours."""
    texts = [(each, each.text.removeprefix("lightning_echo: ")) for each in messages]
    return [each for each, text in texts if re.match(r"[A-Z][a-z]", text) and not re.match(NAMES, text)]


def without_cause(messages: list[Message]) -> list[Message]:
    """Messages that say that something failed, and not what or why."""
    return [each for each in messages if re.search(r"\bfail(s|ed|ure)?\b", each.text) and "{" not in each.text]


def not_prefixed(messages: list[Message]) -> list[Message]:
    """Messages that do not say once whose they are. The summary begins with the name, see tests/integration/test_callback.py."""
    return [
        each
        for each in messages
        if not each.text.startswith(("lightning_echo: ", "{summar")) or each.text.count("lightning_echo: ") > 1
    ]


def test_all_of_them_are_printed() -> None:
    """With ``-s`` they can be read in a row."""
    print()
    for each in ALL:
        print(f"{each.place}  {each.kind}: {each.text}")
    assert len(ERRORS) > 250
    assert len(TOLD) > 10
    assert len(LOGGED) > 10


def shown(messages: list[Message]) -> list[str]:
    return [f"{each.place}  {each.kind}: {each.text}" for each in messages]


def test_every_error_has_a_text() -> None:
    assert shown(wordless(ERRORS)) == []


@pytest.mark.parametrize("name", sorted(CONTROL_FLOW))
def test_what_has_no_text_is_caught_in_the_package(name: str) -> None:
    caught = [
        node
        for path in ROOT.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ExceptHandler) and node.type is not None and name in re.findall(r"\w+", ast.unparse(node.type))
    ]
    assert caught


def test_an_error_about_a_value_says_which_value_came() -> None:
    assert shown(without_value(ERRORS)) == []


def test_messages_are_tidy() -> None:
    assert shown(untidy(ALL)) == []
    assert shown(capitalised(ALL)) == []


def test_nothing_just_fails() -> None:
    assert shown(without_cause(ALL)) == []


def test_what_is_told_outside_the_log_says_once_whose_it_is() -> None:
    assert shown(not_prefixed(TOLD)) == []


def test_lines_of_the_log_have_no_name_of_ours() -> None:
    """The logger has it, and the handler for programs without a set-up adds it."""
    assert shown([each for each in LOGGED if "lightning_echo:" in each.text]) == []


def test_a_warning_has_a_category_and_points_to_the_users_line() -> None:
    warned = [each for each in TOLD if each.kind == "warnings.warn"]
    assert warned
    wrong = [
        each for each in warned if len(each.call.args) < 2 or not any(word.arg == "stacklevel" for word in each.call.keywords)
    ]
    assert shown(wrong) == []


@pytest.mark.parametrize(
    ("rule", "bad", "good"),
    [
        (wordless, "raise ValueError", "raise Closed()"),
        (wordless, "raise ValueError()", "raise ValueError('factor is missing')"),
        (without_value, "raise ValueError('factor must be >= 1')", "raise ValueError(f'factor must be >= 1, got {factor!r}')"),
        (untidy, "raise ValueError('it is wrong.')", "raise ValueError('it is wrong: Trainer(...) is right')"),
        (untidy, "LOGGER.info('one.. two')", "LOGGER.info('one. Two')"),
        (capitalised, "raise ValueError('The factor is wrong')", "raise ValueError('EchoCallback has no factor')"),
        (without_cause, "raise RuntimeError('reading failed')", "raise RuntimeError(f'reading {path} failed')"),
        (not_prefixed, "warnings.warn('slow')", "warnings.warn('lightning_echo: slow')"),
        (not_prefixed, "rank_zero_warn('lightning_echo: lightning_echo: slow')", "rank_zero_warn('lightning_echo: slow')"),
    ],
)
def test_the_rules_can_be_broken(rule, bad, good) -> None:  # type: ignore[no-untyped-def]
    assert rule(messages_of(bad, "bad.py"))
    assert not rule(messages_of(good, "good.py"))
