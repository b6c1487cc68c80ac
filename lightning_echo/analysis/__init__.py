"""Stall analysis: where the time for input goes, what would help, and when not to echo.

    measured.py     what was measured of each stage: a value
    predict.py      what another setting would bring
    verdict.py      what to do
    result.py       all of it: a value that can be saved, compared and asked
    checks.py       a setting tried
    analyzer.py     the phases in their order
    command.py      ``python train.py analyze``

    probing/        what is run to learn it
        data.py, process.py, ranks.py   copies of the user's data; what of this process is put back; what ranks tell each other
        pages.py, transforms.py         what is seen in a worker: files, and transforms in a Compose
        parts.py, loading.py            what of a loader's work can be run alone; a loader run alone, part of it at a time
        phases.py, streams.py           the loader's phases: in parts, or as a whole
        fits.py, copying.py             a training: how long its steps take, and the copies to the device
    report/         what people see: answers, tables, text, a plot, a page

In: a model and its data. Out: a `StallAnalysis`: rates, predictions, a verdict.

May import: ``training`` and below, `EchoDataModule`; what does not train knows no Lightning. A change must not break: the user's
model, data, files and random states are after an analysis what they were before.

The method is DS-Analyzer's (Mohan et al. 2021, arXiv 2007.06775), without root and without changes to a program.
"""
