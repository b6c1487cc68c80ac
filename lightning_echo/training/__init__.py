"""Lightning's side: the loaders of a Trainer are echoed, and the training is measured from its hooks."""
