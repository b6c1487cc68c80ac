"""Runs what tells where the time goes: a loader alone, parts of its work, a short training.

* In: copies of a model and its data.
* Out: seconds and bytes, as values of ``measured``.
* May import: ``training`` and below.
* A change must not break: nothing that is run leaves a trace in the user's objects, files and random states.
"""
