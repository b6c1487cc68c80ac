"""The doctor finds problems of this machine, or of a data module, before a training has them."""
