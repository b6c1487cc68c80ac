"""The runs that show where the time goes: a loader alone, parts of its work, a short training.

* In: copies of a model and its data.
* Out: seconds and bytes, as values of ``measured``.
* May import: ``training`` and below.
* A change must not break: no run changes the user's objects, files and random states.
"""
