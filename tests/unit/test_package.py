"""The package itself: its names can be imported."""

import pytest

import lightning_echo


@pytest.mark.parametrize("name", lightning_echo.__all__)
def test_each_public_name_can_be_imported(name):
    assert getattr(lightning_echo, name).__name__ == name


def test_an_unknown_name_is_refused_as_by_any_module():
    with pytest.raises(AttributeError, match="module 'lightning_echo' has no attribute 'EchoLoaderr'"):
        _ = lightning_echo.EchoLoaderr
