"""Doubles of loaders and streams that save their own state: two ways to begin the next pass."""


class Ends:
    """Counts its own passes and items, and goes on where a state was taken: at the end of a pass with nothing.

    Args:
        lengths: Of its passes, over and over.

    Attributes:
        read: Items that it has yielded.
    """

    def __init__(self, *lengths):
        self.lengths, self.at, self.number, self.read = lengths, 0, 0, 0

    def item(self):
        return 100 * self.number + self.at

    def length(self):
        return self.lengths[self.number % len(self.lengths)]

    def __iter__(self):
        while self.at < self.length():
            item = self.item()
            self.at, self.read = self.at + 1, self.read + 1
            yield item
        self.number, self.at = self.number + 1, 0

    def state_dict(self):
        return {"at": self.at, "number": self.number}

    def load_state_dict(self, state):
        self.at, self.number = state["at"], state["number"]


class RollsOver(Ends):
    """As `Ends`, but its next pass begins where its last item was handed out."""

    def __iter__(self):
        number = self.number
        while self.number == number:
            item, length = self.item(), self.length()
            self.at, self.read = self.at + 1, self.read + 1
            if self.at == length:
                self.number, self.at = number + 1, 0
            yield item
