"""What an attack is: a function around what a hostile worker sends, or around its batches."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from paceline.errors import UsageError
from paceline.pieces import Piece, read


@dataclass(frozen=True, kw_only=True)
class Attack(Piece, ABC):
    """An attack by the last `workers` of those workers that a run begins with, so that the first, which evaluates, is
    honest; where clients send, by the last so many clients."""

    workers: int = 1

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise ValueError(f"workers must be at least 1, not {self.workers}")

    def is_hostile(self, rank: int, *, size: int) -> bool:
        """Whether the worker of this rank is an attacker. `size`: workers that the run begins with, of ranks 0 to
        before that; others join it later."""
        return size - self.workers <= rank < size


class SentAttack(Attack, ABC):
    """Changes what hostile workers send."""

    least_known: ClassVar[int] = 1
    """Honest contributions that it has to know. One may be what the hostile worker has computed itself, as an honest
    worker would; 0: it looks at that one alone."""

    @abstractmethod
    def sent(self, own: Tensor, honest: Tensor, *, size: int, generator: torch.Generator) -> Tensor:
        """What is sent, 1-D. No argument is changed, but for the generator.

        Args:
            own: what the worker would send if it were honest, 1-D.
            honest: what all honest workers send, one a row; or `own` as the only row, where nobody knows more.
            size: how many send, of which `workers` are hostile.
        """


class DataAttack(Attack, ABC):
    """Changes the batches that hostile workers train on."""

    @abstractmethod
    def poisoned(self, inputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """The batch that is trained on; the arguments stay as they are.

        Args:
            inputs: one sample an entry of the first dimension.
            labels: class indices, 1-D.
        """

    def of_batch(self, batch: Any) -> Any:
        """A loader's batch, poisoned. Raises UsageError if it is not (inputs, labels)."""
        if not (isinstance(batch, list | tuple) and len(batch) == 2 and all(isinstance(x, Tensor) for x in batch)):
            raise UsageError(f"{self} poisons batches of (inputs, labels), and the loader gives {type(batch).__name__}")
        inputs, labels = batch
        if labels.dim() != 1 or labels.is_floating_point():
            raise UsageError(f"{self} needs class indices as labels, not {labels.dtype} of shape {tuple(labels.shape)}")
        poisoned = self.poisoned(inputs, labels)
        return list(poisoned) if isinstance(batch, list) else poisoned


def parse(texts: Sequence[str]) -> tuple[Attack, ...]:
    """The attacks of texts such as `sign-flip:workers=2`. Raises UsageError if there is no such attack or option."""
    return tuple(read(Attack, text) for text in texts)


def require_possible(attacks: Sequence[Attack], *, num_senders: int, knows_all: bool, kind: str = "worker") -> None:
    """Raises UsageError for an attack that so many senders cannot make.

    Args:
        kind: what senders are called.
        knows_all: hostile workers see what honest ones send before they send something themselves.
    """
    for attack in attacks:
        num_honest = num_senders - attack.workers
        if num_honest < 1:
            raise UsageError(f"--attack {attack} leaves none of {num_senders} {kind}(s) honest")
        known = num_honest if knows_all else 1
        if isinstance(attack, SentAttack) and known < attack.least_known:
            why = "" if knows_all else ", and under this strategy workers do not see what others are about to send"
            raise UsageError(
                f"--attack {attack} has to know what {attack.least_known} honest {kind}s send{why}; use more {kind}s, "
                "or a strategy in which they meet, such as all-reduce or ps-bsp"
            )
