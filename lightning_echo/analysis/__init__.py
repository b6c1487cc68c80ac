"""Stall analysis: where the time for input goes, what would help, and when not to echo.

* In: a model and its data.
* Out: a `StallAnalysis` with rates, predictions and a verdict.
* May import: ``training`` and below, and `EchoDataModule`. The files that run no training import no Lightning.
* A change must not break: an analysis leaves the user's model, data, files and random states as they were.

The method is DS-Analyzer's (Mohan et al. 2021, arXiv 2007.06775), without root and without changes to a program.
"""
