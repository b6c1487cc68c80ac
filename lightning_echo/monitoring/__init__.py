"""What a training waits for, seen from its hooks: times and counts of each epoch, the decision, the log.

In: hooks of a Trainer. Out: an `Observation` for the controller, an `EpochReport`, logged metrics.

May import: ``measuring``, ``training`` and below. A change must not break: all ranks decide alike, and metrics of the user are
never touched.
"""
