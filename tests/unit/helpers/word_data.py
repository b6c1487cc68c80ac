"""A small data set of words, which a cache can hold."""

from lightning_echo import StagedDataset
from lightning_echo.cache.loader_cache import LoaderCache
from lightning_echo.split.check import WatchedStages
from lightning_echo.split.prove import find_split, make_stages
from lightning_echo.split.staged import uncut_stages


class Words(StagedDataset):
    def __init__(self, words):
        self.words = words

    def load(self, index):
        return self.words[index]

    def augment(self, example):
        return example

    def __len__(self):
        return len(self.words)


class OtherWords(Words):
    """The same words from elsewhere."""


WORDS = [f"word {number}" for number in range(20)]


def cache_of(dataset, config, indices=None, *, whole=False, differs=False):
    """The cache of a loader: for echoes of loaded examples, or of whole ones."""
    split = None if whole else find_split(dataset)

    def watched(data):
        return WatchedStages(make_stages(data, split.conventions), data, refusal=None)

    make = uncut_stages if whole else watched
    return LoaderCache(config, dataset, indices, split, make, differs_in_workers=differs)
