"""The shape of a plan whose items are whole batches."""

from lightning_echo.plan.plan import PlanShape


def batches_shape(batches_per_pass=13, buffer_size=4, seed=0):
    sizes = {"batch_size": 1, "last_batch_size": 1, "batches_per_pass": batches_per_pass, "buffer_size": buffer_size}
    return PlanShape(**sizes, workers=1, seed=seed, distinct=False)
