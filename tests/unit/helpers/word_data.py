"""A small data set of words, which a cache can hold."""

from lightning_echo import StagedDataset


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
    pass


WORDS = [f"word {number}" for number in range(20)]
