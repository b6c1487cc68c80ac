"""Lightning's side of echoing: the loader that a Trainer trains on is echoed, or several loaders of a collection.

* In: a Trainer's hooks, and what ``train_dataloader`` returns.
* Out: the same loaders, echoed. The Trainer knows how long epochs are.
* May import: ``loading`` and below, `EchoConfig`.

A change must not break:

* Only Lightning's public API is used.
* The user's module and its attributes stay as they are.
* A reload, a resumed run and a second ``fit`` continue where the run stopped.
"""
