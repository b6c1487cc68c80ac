"""What people see of figures: tables, text, a picture, a page. A run's summary is shown here.

* In: a `RunSummary`; tables and pictures that others make in the same style.
* Out: text, figures, HTML.
* May import: the values of ``measuring``; no Lightning. matplotlib is imported where something is drawn.
* A change must not break: a file that a run has left is shown on any machine, without Lightning and without the program.
"""
