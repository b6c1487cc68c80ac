"""Lightning's side: where a Trainer's loader is echoed, for one loader or for several.

In: a Trainer's hooks and what ``train_dataloader`` returns. Out: the same, echoed, with the Trainer told of the length of epochs.

May import: ``loading`` and below, `EchoConfig`. A change must not break: only Lightning's public API; what the user's module is
and holds stays as it is; a reload, a resume and a second ``fit`` go on.
"""
