"""Data sets for the workers' cache and requests for it; the shape of a plan whose items are whole batches."""

import random

import numpy as np
import torch
from torch.utils.data import Dataset

from lightning_echo.pipeline.requests import ExampleRequests
from lightning_echo.pipeline.worker import LiveExamples, Request
from lightning_echo.plan.each import EachPlan
from lightning_echo.plan.order import ShuffledOrder
from lightning_echo.plan.plan import PlanShape
from lightning_echo.split.prove import make_stages
from lightning_echo.split.staged import StagedDataset, uncut_stages

LENGTH, BATCH_SIZE = 40, 6


def noise():
    return float(torch.rand(())), float(np.random.rand()), random.random()


class Plain(Dataset):
    def __init__(self):
        self.log = []

    def __getitem__(self, index):
        self.log.append(index)
        return index, noise()

    def __len__(self):
        return LENGTH


class Whole(Plain):
    def __init__(self):
        super().__init__()
        self.calls = []

    def __getitems__(self, indices):
        self.calls.append(list(indices))
        return [(index, noise()) for index in indices]


class Staged(StagedDataset):
    def __init__(self):
        self.log = []

    def load(self, index):
        self.log.append(index)
        return [index]

    def augment(self, example):
        example.append(noise())
        return example

    def __len__(self):
        return LENGTH


def listed(examples):
    return list(examples)


class Tensors(StagedDataset):
    def load(self, index):
        return torch.full((3,), float(index))

    def augment(self, example):
        return example.add_(0.5)

    def __len__(self):
        return LENGTH


def make_cache(dataset, point="after_augmentation", key=7, collate_fn=listed):
    return LiveExamples(dataset, uncut_stages if point == "after_augmentation" else make_stages, key, collate_fn)


def make_requests(factor, whole_calls=False, state=None):
    sizes = {"batch_size": BATCH_SIZE, "last_batch_size": 4, "batches_per_pass": 7, "buffer_size": 2 * BATCH_SIZE}
    shape = PlanShape(**sizes, workers=0, seed=1)
    order = ShuffledOrder(LENGTH, LENGTH, 1, 0, shape.distance, seed=2)
    if state is not None:
        order.load(state["order"])
    plan = EachPlan(shape, factor) if state is None else EachPlan.from_state(shape, state["plan"])
    return ExampleRequests(plan, order, whole_calls=whole_calls)


def request(positions, fresh, indices=None, stays_live="", number=0, **kwargs):
    """A request; ``stays_live`` as a string of 0 and 1, all 0 by default."""
    indices = positions if indices is None else indices
    stays_live = bytes(map(int, stays_live)) if stays_live else bytes(len(positions))
    return Request(number, list(positions), fresh, list(indices), stays_live, **kwargs)


def batches_shape(batches_per_pass=13, buffer_size=4, seed=0):
    sizes = {"batch_size": 1, "last_batch_size": 1, "batches_per_pass": batches_per_pass, "buffer_size": buffer_size}
    return PlanShape(**sizes, workers=1, seed=seed, distinct=False)
