"""Machines that a test makes up: packages, environment and the kernel's files."""

from lightning_echo.doctor.machine import Machine

GOOD = {"torch": "2.9.0", "torchvision": "0.24.0", "lightning": "2.6.6", "lightning-echo": "0.1.0"}
GIB = 2**30


def machine(folder, packages=(), *, files=(), **other):
    """A Linux machine with 8 cores, 16 GiB of memory and 8 GiB of shared memory, with nothing to complain about.

    Args:
        folder: Where its files are written.
        packages: Versions that differ; None for what is not installed.
        files: More files by their path: of the kernel under proc and cgroups.
        other: Fields of the `Machine`.
    """
    kernel = {"proc/meminfo": f"MemTotal: {16 * GIB // 1024} kB\nMemAvailable: {8 * GIB // 1024} kB\n", **dict(files)}
    for name, text in kernel.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    installed = {**GOOD, **dict(packages)}
    fields = {
        "python": (3, 12, 4),
        "platform": "linux",
        "environ": {},
        "version_of": installed.get,
        "import_operators": lambda: None,
        "affinity": 8,
        "proc": folder / "proc",
        "cgroups": folder / "cgroups",
        "space_of": lambda path: (8 * GIB, 8 * GIB),
    }
    return Machine(**{**fields, **other})
