"""The doctor: what on this machine, or of a data module, would go wrong, before a training finds it out.

* In: what this machine and its environment show (`Machine`), and a training loader, or what returns one.
* Out: `Finding`s: a status, one sentence, and the way out; all of them as text, or as a document for programs.
* May import: ``training`` and below, and `EchoDataModule`. The files that look at the machine import neither torch nor Lightning.
* A change must not break: an exception in the user's code is a finding, and never ends the doctor; names and statuses in the
  document stay the same for its version; checks of a machine read nothing but the `Machine` that they are given.

The files: `findings.py` is the value. `machine.py` holds what is looked at, `versions.py` and `resources.py` judge it.
`target.py` finds the user's data, `loader_checks.py`, `memory_checks.py` and `traps.py` look at a loader. `command.py` runs all
of it, `examining.py` adds it to `EchoCLI`.
"""
