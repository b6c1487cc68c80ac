"""The doctor: it finds problems of this machine, or of a data module, before a training has them.

* In: what this machine and its environment show (`Machine`), and a training loader, or what returns one.
* Out: `Finding`s: a status, one sentence, and the way out. They can be text, or a document for programs.
* May import: ``training`` and below, and `EchoDataModule`. The files that check the machine import neither torch nor Lightning.

A change must not break:

* An exception in the user's code is a finding, and never ends the doctor.
* Names and statuses in the document stay the same for its version.
* Checks of a machine read only the `Machine` that they are given.

The files:

* `findings.py`: a finding, as a value
* `machine.py`: what is known of the machine
* `versions.py`, `resources.py`: the checks of the machine
* `target.py`: finds the user's data
* `looking.py`: what is known of a loader
* `loader_checks.py`, `memory_checks.py`, `traps.py`: the checks of a loader
* `command.py`: runs all of it
* `examining.py`: adds it to `EchoCLI`
"""
