"""The command as a whole: what it prints, and its exit status. Machine and data are made up."""

import json
import sys
from types import SimpleNamespace

import lightning.pytorch as pl
import pytest
import torch
from loaders_with_traps import Examples, Unreadable
from machines import machine
from torch.utils.data import DataLoader

from lightning_echo.__main__ import main
from lightning_echo.data.machine import CoreUse
from lightning_echo.doctor.command import examine


def document(capsys, get, made):
    """The exit status, and the findings by what they are about and their names."""
    status = examine(get, as_json=True, machine=made)
    printed = json.loads(capsys.readouterr().out)
    assert printed["lightning_echo_doctor"] == 1
    return status, {(each["about"], each["name"]): each for each in printed["findings"]}


def plain(dataset, **options):
    return DataLoader(dataset, 4, shuffle=True, pin_memory=torch.cuda.is_available(), **options)


def test_a_machine_alone_is_told_as_text_and_an_error_is_status_1(tmp_path, capsys):
    assert examine(None, as_json=False, machine=machine(tmp_path)) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("machine\n  ok      Python 3.12.4.\n")
    assert printed.endswith("\n0 errors, 0 warnings\n")
    assert examine(None, as_json=False, machine=machine(tmp_path, {"lightning": "2.6.2"})) == 1


def test_who_has_the_cores_is_looked_at_before_the_first_check_and_after_the_last(tmp_path, capsys):
    looks = []

    def get():
        looks.append("data")
        return plain(Examples())

    seen = CoreUse(8.0, 1.0, 8.0, 0.1, 0.0)
    watch = SimpleNamespace(look=lambda: looks.append("cores"), use=seen, is_blind=False)
    status, found = document(capsys, get, machine(tmp_path, watch=watch))
    assert (status, looks) == (0, ["cores", "data", "cores"])
    assert found["machine", "load"]["figures"] == {"others_cores": 7.0, "own_cores": 1.0, "stopped_fraction": 0.0}


def test_data_is_looked_at_from_its_workers_to_its_traps(tmp_path, capsys):
    status, found = document(capsys, lambda: plain(Examples()), machine(tmp_path, affinity=1))
    assert status == 0
    assert [name for about, name in found if about == "data"] == [
        *(
            "loader",
            "workers",
            "pickle",
            "split",
            "insertion_points",
            "reads_in_flight",
            "core_rate",
            "example_bytes",
            "buffer",
            "cache",
        ),
        *("first_batch", "traps"),
    ]


def test_batches_that_workers_hand_over_are_compared_with_this_machines_shared_memory(tmp_path, capsys):
    made = machine(tmp_path, affinity=2, space_of=lambda path: (2**30, 50))
    status, found = document(capsys, lambda: plain(Examples(), num_workers=1, persistent_workers=True), made)
    assert (status, found["data", "prefetched_batches"]["status"]) == (1, "error")
    assert found["data", "prefetched_batches"]["figures"] == {"batches": 2, "needed_bytes": 2 * 4 * 12, "free_bytes": 50}


def test_each_loader_of_a_collection_has_findings_of_its_own(tmp_path, capsys):
    _, found = document(capsys, lambda: {"a": plain(Examples()), "b": plain(Examples(9))}, machine(tmp_path))
    assert ("data, loader 'a'", "last_batch_of_one") not in found
    assert ("data, loader 'b'", "last_batch_of_one") in found


@pytest.mark.parametrize(
    ("loader", "name", "text"),
    [
        (plain(Unreadable()), "example", "FileNotFoundError: image 0"),
        (iter([1]), "loader", "This loader cannot be echoed: loader must be iterable again in every pass"),
    ],
)
def test_what_goes_wrong_in_the_users_data_is_a_finding_with_its_message(loader, name, text, tmp_path, capsys):
    status, found = document(capsys, lambda: loader, machine(tmp_path))
    assert status == 1
    assert found["data", name]["status"] == "error"
    assert text in found["data", name]["sentence"]
    assert found["data", name]["hint"]


def test_what_a_data_module_prints_or_breaks_does_not_reach_the_document(tmp_path, capsys):
    class Broken(pl.LightningDataModule):
        def setup(self, stage):
            print("setting up")
            raise RuntimeError("no images")

    assert examine(Broken, as_json=True, machine=machine(tmp_path)) == 1
    printed = capsys.readouterr()
    assert json.loads(printed.out)["findings"][-1]["sentence"] == "setup('fit') of Broken raised RuntimeError: no images."
    assert printed.err == "setting up\n"


def test_from_the_command_line_a_wrong_name_is_status_2_in_one_line(capsys, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert main(["doctor", "no_such_module:loader"]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("error: there is no module 'no_such_module'")
    assert printed.err.count("\n") == 1
