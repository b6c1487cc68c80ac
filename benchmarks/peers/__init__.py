"""Side by side: data echoing with this package, and with what people use instead. ``make peers``; see ../README.md.

```
__main__   options, order of events        loaders    what is compared: one function makes each loader
speed      steps per second, in turn       data       a data set whose reads are counted, whoever reads
facts      what one peer does: by itself,  arithmetic of lists of example ids: duplicates, places, coverage, resuming
           in a Trainer, on two ranks      processes  facts are gathered in processes that may die: then that is the fact
verdicts   facts -> what is wrong          tables     the facts as a table, machine and versions
```

All peers read the same data set with as many workers, in batches of the same size, each example `FACTOR` times. Everything in the
tables is measured: what a peer cannot do is what came of trying.
"""
