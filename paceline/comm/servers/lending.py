"""A server's end of a loan: when it lends its shards to the workers, and how it gets them back."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from paceline.aggregate import MEAN
from paceline.comm.servers.loan import (
    CLOCK,
    HAS_PUSHED,
    ITERATION,
    NUM_APPLIED,
    PULLED_AT,
    Loan,
    Version,
    loan_bytes,
)
from paceline.comm.shared_memory import mutex
from paceline.comm.shared_memory.block import BlockAddress, SharedBlock
from paceline.elastic.lanes import Done
from paceline.messages import FRAME_BYTES
from paceline.server.closing import Applied
from paceline.server.optimizer import STEPS_IN_PLACE
from paceline.server.part import Part
from paceline.server.part_state import states_of
from paceline.server.spec import ServerSpec

_PLACES = 256
"""For workers that have joined and died since the run began, where it is elastic. One that comes after so many talks to
the servers, which lend nothing while it is there."""


class Returned(NamedTuple):
    """The gradients that workers have applied to a server's shards, as it finds them when it takes these back."""

    applied: list[Applied]
    """The gradients applied since they were last looked for."""
    counted: Mapping[int, tuple[int, Done]]
    """By worker that has pushed: the clock of its last gradient that counts, and what it had done then."""


def can_lend(spec: ServerSpec) -> bool:
    """Whether a server of this spec may lend its shards: those of a small model, a plain rule, a known optimizer."""
    layout, optimizer = spec.layout, spec.optimizer
    is_cut = optimizer.element_wise and bool(spec.pieces)
    is_small = layout.num_bytes <= FRAME_BYTES
    is_plain = spec.rule.is_plain and spec.aggregator == MEAN and optimizer.optimizer_class in STEPS_IN_PLACE
    is_single_or_double = all(segment.dtype in (torch.float32, torch.float64) for segment in layout.segments)
    return mutex.IS_AVAILABLE and is_cut and is_small and is_plain and is_single_or_double


@final
class Lending:
    """Lends the shards of a server of this spec, which answers for all of them at once."""

    def __init__(self, spec: ServerSpec) -> None:
        self.num_places = max(spec.rule.members.size, _PLACES if spec.outlives_workers else 0)
        self._spec = spec
        self._block = SharedBlock.create(loan_bytes(spec.layout, self.num_places))
        mutex.prepare(self._block.tensor.data_ptr())
        self._loan = Loan(self._block.tensor, spec.layout, spec.pieces, self.num_places)
        self._num_loans = 0
        self._borrowers: Sequence[int] = ()

    @property
    def address(self) -> BlockAddress:
        return self._block.address

    @property
    def iteration(self) -> int:
        """Which workers had reached when the shards were last theirs."""
        return self._loan.iteration

    def lend(self, parts: Sequence[Part], gradients: Mapping[int, Sequence[int]]) -> None:
        """The quiet shards are the workers' from now on, unless hyperparameters are no plain numbers.

        Args:
            gradients: by worker that takes part, where they lie.
        """
        loan, shard = self._loan, parts[-1].shard
        states = states_of(parts)
        described = [(name, str(state.dtype).removeprefix("torch."), state.shape) for name, state in states.items()]
        terms = {
            "joins": self._spec.rule.needs_all,
            "max_updates": self._spec.max_updates,
            "groups": [settings for _, settings in sorted(_settings_of(parts).items())],
            "states": described,
            "borrowers": list(gradients),
            "gradients": list(gradients.values()),
        }
        with loan.lock:
            index = 1 - loan.in_force
            version = loan.versions[index]
            try:
                loan.write_terms(json.dumps(terms).encode())
            except (TypeError, ValueError):
                return
            for own, lent in self._pairs(parts, states, version, described):
                lent.copy_(own)
            words = version.words
            words[ITERATION], words[NUM_APPLIED] = shard.iteration, loan.num_told
            clocks = shard.clocks()
            for worker in gradients:
                start, (clock, pulled_at) = loan.starts[worker], clocks[worker]
                words[start + CLOCK], words[start + PULLED_AT], words[start + HAS_PUSHED] = clock, pulled_at, 0
            loan.put_in_force(index)
            self._num_loans += 1
            self._borrowers = list(gradients)
            loan.number = self._num_loans

    def take_back(self, parts: Sequence[Part]) -> Returned:
        """The shards are the server's again. Workers whose gradients wait for others push them to the server."""
        loan = self._loan
        if not loan.number:
            return Returned([], {})
        with loan.lock:
            loan.number = 0
            loan.wake()
        version = loan.versions[loan.in_force]
        for own, lent in self._pairs(parts, states_of(parts), version, json.loads(loan.read_terms())["states"]):
            own.copy_(lent)
        words, before, counted = version.words, parts[-1].shard.clocks(), {}
        clocks = dict(before)
        for worker in self._borrowers:
            start = loan.starts[worker]
            clocks[worker] = clock, _ = words[start + CLOCK], words[start + PULLED_AT]
            if clock > before[worker][0]:
                counted[worker] = clock - 1, version.done(start)
        for part in parts:
            part.shard.resume(words[ITERATION], clocks)
        return Returned(loan.take_notes(), counted)

    def look(self) -> list[Applied]:
        """The gradients that workers have applied since this was last asked."""
        return self._loan.take_notes()

    def close(self) -> None:
        self._block.close()

    def _pairs(
        self,
        parts: Sequence[Part],
        states: Mapping[str, Tensor],
        version: Version,
        described: Sequence[Sequence[Any]],
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Every tensor of the shards, and its place in the version."""
        for part in parts:
            for own, piece in zip(part.shard.parameters, part.pieces, strict=True):
                yield own, piece.view(self._loan.layout, version.parameters)
        for name, lent in version.states(described).items():
            yield states[name], lent


def _settings_of(parts: Sequence[Part]) -> dict[int, dict[str, Any]]:
    """The hyperparameters of each of the optimizer's groups."""
    return {
        group: {name: value for name, value in settings.items() if name != "params"}
        for part in parts
        for group, settings in zip(part.groups, part.shard.optimizer.param_groups, strict=True)
    }
