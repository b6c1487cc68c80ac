"""Stall analysis: where the time for input goes, what would help, and when not to echo.

    measured.py   what was measured of each stage: a value
    predict.py    what another setting would bring
    verdict.py    what to do
    pages.py      files that workers read, and how to have them read from the storage again
    loading.py    a loader run alone, part of it at a time

The method is DS-Analyzer's (Mohan et al. 2021, arXiv 2007.06775), without root and without changes to a program.
"""
