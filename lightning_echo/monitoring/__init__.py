"""Measures a training from Lightning's hooks: the times and counts of each epoch, the decision, the log.

* In: the hooks of a Trainer.
* Out: an `Observation` for the controller, an `EpochReport`, logged metrics.
* May import: ``measuring``, ``training`` and below.
* A change must not break: all ranks decide alike, and the user's metrics are never changed.

| file | idea |
| --- | --- |
| ``profiler_tap`` | hears when Lightning fetches a batch and copies it |
| ``run_counts`` | fresh and echoed examples of the run, over all ranks |
| ``loader_meter`` | what the workers of one loader spend; what several loaders cost together |
| ``run_meter`` | joins these for the whole run, epoch by epoch |
| ``decider`` | shows the controller an epoch, and gives all ranks the decision of rank 0 |
| ``logged`` | what goes to loggers, to the report and to the progress bar |
"""
