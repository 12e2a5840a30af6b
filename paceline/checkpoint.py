"""What a run needs to go on: one weights-only torch file, the same whatever the strategy and the number of servers."""

from __future__ import annotations

import io
import pickle
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from paceline.errors import UsageError

FILE_NAME = "checkpoint.pt"
_FORMAT = 1


@dataclass(frozen=True)
class WorkerState:
    """Where one worker was."""

    steps: int
    samples: int
    epoch: int
    num_batches_done: int
    random_state: dict[str, Any]


@dataclass(frozen=True)
class Checkpoint:
    """A run at one iteration."""

    iteration: int
    time_s: float
    """On the training clock."""
    model: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    """Keyed `<parameter index>.<state name>`, full tensors."""
    groups: list[dict[str, Any]]
    """Hyperparameters of the optimizer's groups."""
    workers: list[WorkerState]
    seed: int
    extra: dict[str, Any] = field(default_factory=dict)
    """State of what else was given to `prepare`, by name."""

    def encode(self) -> bytes:
        """As bytes of a weights-only torch file."""
        content = {f.name: getattr(self, f.name) for f in fields(self)}
        content["workers"] = [asdict(worker) for worker in self.workers]
        buffer = io.BytesIO()
        torch.save({"format": _FORMAT, **content}, buffer)
        return buffer.getvalue()

    @classmethod
    def decode(cls, raw: bytes, *, where: str) -> Checkpoint:
        """Read what `encode` wrote; nothing is unpickled freely.

        Args:
            where: the file's name, for errors.

        Raises:
            UsageError: the bytes are no checkpoint of this format.
        """
        try:
            content = torch.load(io.BytesIO(raw), weights_only=True, map_location="cpu")
            if content.pop("format") != _FORMAT:
                raise UsageError(f"{where} is a checkpoint of another version of Paceline")
            workers = [WorkerState(**worker) for worker in content.pop("workers")]
            return cls(workers=workers, **content)
        except (KeyError, TypeError, AttributeError, RuntimeError, EOFError, ValueError, pickle.UnpicklingError) as error:
            if isinstance(error, UsageError):
                raise
            raise UsageError(f"{where} is no checkpoint, or a damaged one: {error}") from None
