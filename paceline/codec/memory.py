"""What a worker keeps of a tensor that it sent, for the next: composed with any codec of single tensors."""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple, final

import torch
from torch import Tensor

from paceline.codec.base import Codec, Payload, TensorCodec


class Encoded(NamedTuple):
    """A tensor that is ready to leave."""

    payload: Payload
    memory: Tensor | None
    """What is to be given with the next tensor."""


class Memory(ABC):
    """What becomes of the difference between what a worker has and what others decode."""

    @abstractmethod
    def start(self, like: Tensor) -> Tensor | None:
        """The memory before the first tensor of this shape; None: nothing is kept."""

    @abstractmethod
    def encode(self, codec: TensorCodec, tensor: Tensor, memory: Tensor | None, *, seed: int) -> Encoded:
        """No argument is changed."""


@final
@dataclass(frozen=True)
class Forgetful(Memory):
    """Keeps nothing: for unbiased codecs, and signs."""

    def start(self, like: Tensor) -> Tensor | None:
        return None

    def encode(self, codec: TensorCodec, tensor: Tensor, memory: Tensor | None, *, seed: int) -> Encoded:
        return Encoded(codec.encode(tensor, seed=seed), None)


@final
@dataclass(frozen=True)
class ErrorFeedback(Memory):
    """What is left out is added to the next tensor: for gradients and deltas, whose sum counts.

    Seide et al., "1-bit stochastic gradient descent", Interspeech 2014, section 2.1. Without decay what was sent, and
    what is left, add up to all there was.
    """

    decay: float = 1.0

    def start(self, like: Tensor) -> Tensor | None:
        return torch.zeros_like(like)

    def encode(self, codec: TensorCodec, tensor: Tensor, memory: Tensor | None, *, seed: int) -> Encoded:
        whole = tensor if memory is None else torch.add(tensor, memory, alpha=self.decay)
        payload = codec.encode(whole, seed=seed)
        left = torch.sub(whole, codec.decode(payload, whole, seed=seed), out=None if whole is tensor else whole)
        return Encoded(payload, owed(left))


@final
@dataclass(frozen=True)
class SharedEstimate(Memory):
    """The difference to what all who listen believe of this worker so far: for parameters, whose value counts.

    Koloskova, Stich and Jaggi, "Decentralized stochastic optimization and gossip algorithms with compressed
    communication" (CHOCO), ICML 2019, algorithm 2. Who listens adds what it decodes to its own copy of the memory.

    A difference that the codec cannot hold goes as far as it can, and the rest of it goes with the next ones. What is
    not finite travels as it is.
    """

    def start(self, like: Tensor) -> Tensor | None:
        return torch.zeros_like(like)

    def encode(self, codec: TensorCodec, tensor: Tensor, memory: Tensor | None, *, seed: int) -> Encoded:
        estimate = torch.zeros_like(tensor) if memory is None else memory
        difference = tensor - estimate
        if not math.isinf(codec.largest):
            held = difference.clamp(-codec.largest, codec.largest)
            difference = torch.where(difference.isfinite(), held, difference)
        payload = codec.encode(difference, seed=seed)
        return Encoded(payload, self.heard(codec, payload, estimate, seed=seed))

    def heard(self, codec: TensorCodec, payload: Payload, estimate: Tensor, *, seed: int) -> Tensor:
        """What is believed of the sender from here on."""
        return estimate + codec.decode(payload, estimate, seed=seed)


def memory_of(codec: Codec) -> Memory:
    """The memory that suits gradients and deltas under this codec."""
    return ErrorFeedback(codec.decay) if codec.feedback else Forgetful()


def owed(left: Tensor) -> Tensor:
    """Nothing of an element that is not finite, or that the form cannot hold, is owed to the next tensor. In place."""
    return left.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
