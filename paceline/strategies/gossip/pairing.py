"""AD-PSGD's half of a worker: pairs take the mean of their models, whatever else both are at.

Lian, Zhang, Zhang and Liu, "Asynchronous decentralized parallel stochastic gradient descent", ICML 2018, algorithm 1.
Some workers ask and the others answer (section 4.1 there), so that nobody waits for who waits. Sans-IO: a message in,
what is to be sent out.

Where workers may die, a message says as well how far each worker's work is in the model that it carries: so of one that
is dead counts what others have of it.
"""

from collections.abc import Sequence
from typing import NamedTuple, final

import torch
from torch import Tensor

from paceline.elastic import Done, further
from paceline.strategies.gossip.parcel import Parcel
from paceline.topology import Topology


class _Note(NamedTuple):
    """What a message says besides the model."""

    is_answer: int
    stop: int
    left: int
    """Gradients that may still be applied, which the asker hands over, or gets back as its part of what both have."""
    is_in: int


def askers(topology: Topology, size: int) -> list[bool]:
    """Whether each worker asks, rather than answers: worker 0 does, and nobody whom it asks.

    Raises ValueError unless links go both ways, stay, and each joins one who asks with one who answers.
    """
    near = [topology.neighbours(0, rank, size) for rank in range(size)]
    is_two_way = all(each.receives_from.keys() == each.sends_to.keys() for each in near)
    if topology.period(size) > 1 or not is_two_way:
        raise ValueError(f"under {topology} links change or go one way; pairs need links that stay and go both ways")
    asks: dict[int, bool] = {0: True}
    edge = [0]
    for rank in edge:
        for other in near[rank].sends_to:
            if asks.setdefault(other, not asks[rank]) == asks[rank]:
                raise ValueError(
                    f"under {topology} {size} workers do not fall into those who ask and those who answer, with all "
                    "links between the two; rings of an even number, chains, stars, trees and hypercubes do"
                )
            if other not in edge:
                edge.append(other)
    return [asks.get(rank, True) for rank in range(size)]


@final
class Pairing:
    """One worker's model, as its neighbours see it, and what it knows of how far all are.

    Args:
        model: laid out like the parameters, apart from them: gradients are computed while it changes.
        done: how far each worker's work is in the model, where workers may die; otherwise empty.
    """

    def __init__(self, model: Parcel, *, rank: int, size: int, done: Sequence[Done] = ()) -> None:
        self.model = model
        self.done = list(done)
        self.counts = [0] * size
        """Gradients that each worker has applied since the start, as far as they are known here."""
        self.left = 0
        """Gradients that this worker may still apply before all meet."""
        self.is_in = False
        """It takes gradients that others could apply, rather than give them all it has."""
        self.stop = False
        """Some worker wants all to stop."""
        self.asked: int | None = None
        """Who owes an answer."""
        self._rank = rank

    def ask(self, other: int) -> Tensor:
        """The message that asks another worker for its model. What may still be applied goes with it, to be shared."""
        self.asked = other
        left, self.left = self.left, 0
        return self._message(_Note(is_answer=False, stop=self.stop, left=left, is_in=self.is_in))

    def word(self) -> Tensor:
        """A message that tells what this worker knows, and has no model."""
        return self._words(_Note(is_answer=False, stop=self.stop, left=0, is_in=False))

    def receive(self, sender: int, message: Tensor) -> list[tuple[int, Tensor]]:
        """Take the mean of both models; returns the answer to who has asked."""
        values, note = self._read(message)
        self.stop = self.stop or bool(note.stop)
        answers: list[tuple[int, Tensor]] = []
        if not values:
            return answers
        if note.is_answer:
            self.asked = None
            self.left += note.left
        else:
            left = self._share(sender, note.left, is_in=bool(note.is_in))
            answer = _Note(is_answer=True, stop=self.stop, left=left, is_in=self.is_in)
            answers = [(sender, self._message(answer))]
        for own, other in zip(self.model.values, values, strict=True):
            own.add_(other.to(own.device)).mul_(0.5)
        return answers

    def _share(self, sender: int, given: int, *, is_in: bool) -> int:
        """What the sender gets of what both have left, in proportion to how fast each has been; all, or nothing, where
        one of them applies no more."""
        if not (is_in and self.is_in):
            share, self.left = (given + self.left, 0) if is_in else (0, given + self.left)
            return share
        total, theirs, mine = self.left + given, self.counts[sender] + 1, self.counts[self._rank] + 1
        share = total * theirs // (theirs + mine)
        self.left = total - share
        return share

    def _message(self, note: _Note) -> Tensor:
        return torch.cat([self.model.buffer[: self.model.layout.num_bytes].cpu(), self._words(note)])

    def _words(self, note: _Note) -> Tensor:
        words = [*note, *self.counts, *(word for done in self.done for word in done)]
        return torch.tensor(words, dtype=torch.int64).view(torch.uint8)

    def _read(self, message: Tensor) -> tuple[list[Tensor], _Note]:
        own, size, each = len(_Note._fields), len(self.counts), len(Done._fields)
        num_bytes = len(message) - (own + size + each * len(self.done)) * torch.int64.itemsize
        words = message[num_bytes:].view(torch.int64).tolist()
        counts, done = words[own : own + size], words[own + size :]
        self.counts = [max(known, told) for known, told in zip(self.counts, counts, strict=True)]
        self.done = [further(known, Done(*done[i * each : (i + 1) * each])) for i, known in enumerate(self.done)]
        return [segment.view(message) for segment in self.model.layout.segments if num_bytes], _Note(*words[:own])
