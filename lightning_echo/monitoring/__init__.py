"""Measures a training from Lightning's hooks: the times and counts of each epoch, the decision, the log.

* In: the hooks of a Trainer.
* Out: an `Observation` for the controller, an `EpochReport`, logged metrics.
* May import: ``measuring``, ``training`` and below.
* A change must not break: all ranks decide alike, and the user's metrics are never changed.
"""
