"""What people see of an analysis: tables, text, a plot, a page.

* In: a `StallAnalysis`.
* Out: text, figures, HTML.
* May import: the values in ``analysis``, no Lightning.
* A change must not break: a saved analysis can be read without Lightning, and without the program that was analyzed.
"""
