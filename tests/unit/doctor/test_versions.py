"""Versions that must not be used, alone or together."""

import pytest
from machines import machine

from lightning_echo.doctor.machine import Status, check_versions


def finding(name, *arguments, **options):
    """The finding of that name on a machine; there is one."""
    (found,) = (each for each in check_versions(machine(*arguments, **options)) if each.name == name)
    return found


def test_a_good_machine_has_nothing_to_complain_about(tmp_path):
    found = check_versions(machine(tmp_path))
    assert {each.status for each in found} == {Status.ok}
    assert [each.name for each in found] == ["python", "torch", "torchvision", "lightning", "lightning_echo"]
    assert [each.figures["version"] for each in found] == ["3.12.4", "2.9.0", "0.24.0", "2.6.6", "0.1.0"]


@pytest.mark.parametrize(
    ("python", "status"),
    [
        ((3, 9, 20), Status.error),
        ((3, 10, 14), Status.warning),
        ((3, 10, 15), Status.ok),
        ((3, 11, 9), Status.warning),
        ((3, 11, 10), Status.ok),
        ((3, 12, 0), Status.ok),
        ((3, 13, 1), Status.ok),
    ],
)
def test_a_python_in_which_forked_workers_may_hang_is_named(python, status, tmp_path):
    found = finding("python", tmp_path, python=python)
    assert found.status is status
    assert ("112275" in found.sentence) == (status is Status.warning)


@pytest.mark.parametrize("package", ["lightning", "pytorch-lightning"])
@pytest.mark.parametrize("version", ["2.6.2", "2.6.3"])
def test_a_malicious_release_is_an_error(package, version, tmp_path):
    found = finding("lightning", tmp_path, {package: version})
    assert found.status is Status.error
    assert "GHSA-w37p-236h-pfx3" in found.sentence
    assert version in found.sentence


@pytest.mark.parametrize(
    ("name", "packages", "text"),
    [
        ("lightning", {"lightning": None}, "lightning is not installed"),
        ("lightning", {"lightning": None, "pytorch-lightning": "2.6.0"}, "pytorch-lightning 2.6.0 is installed"),
        ("lightning", {"lightning": "2.4.1"}, "lightning 2.4.1 is older than 2.5"),
        ("torch", {"torch": None}, "torch is not installed"),
        ("torch", {"torch": "2.3.1+cpu"}, "torch 2.3.1+cpu is older than 2.4"),
    ],
)
def test_what_is_missing_or_too_old_is_an_error(name, packages, text, tmp_path):
    found = finding(name, tmp_path, packages)
    assert found.status is Status.error
    assert text in found.sentence
    assert found.way_out


@pytest.mark.parametrize("version", ["2.4.0", "2.15.0+cpu", "3.0rc1"])
def test_versions_are_compared_as_numbers(version, tmp_path):
    assert finding("torch", tmp_path, {"torch": version}).status is Status.ok


def test_a_torchvision_of_another_torch_is_an_error_with_its_message(tmp_path):
    def fails():
        raise RuntimeError("operator torchvision::nms does not exist")

    found = finding("torchvision", tmp_path, import_operators=fails)
    assert found.status is Status.error
    assert found.sentence == "torchvision 0.24.0 does not fit torch 2.9.0: operator torchvision::nms does not exist."


def test_what_may_be_missing_is_missing_without_complaint(tmp_path):
    packages = {"torchvision": None, "lightning-echo": None}
    assert finding("torchvision", tmp_path, packages).status is Status.ok
    assert finding("lightning_echo", tmp_path, packages).status is Status.ok
