"""A server's end of a loan: when it lends its shard to the workers, and how it gets it back."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import final

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
from paceline.comm.shared_memory import futex, mutex
from paceline.comm.shared_memory.block import BlockAddress, SharedBlock
from paceline.messages import FRAME_BYTES
from paceline.server.admission import StaleSynchronous
from paceline.server.part import Part
from paceline.server.ranges import cut
from paceline.server.shard import Applied
from paceline.server.spec import ServerSpec
from paceline.server.state import export_state


def can_lend(spec: ServerSpec) -> bool:
    """Whether a server of this spec may lend its shard: it has a plain rule, and all of a small model."""
    is_whole = spec.optimizer.element_wise and [spec.pieces] == cut(spec.layout, num_servers=1, whole_tensors=False)
    is_small = spec.layout.num_bytes <= FRAME_BYTES
    return mutex.IS_AVAILABLE and spec.rule.is_plain and spec.aggregator == MEAN and is_whole and is_small


@final
class Lending:
    """Lends the one shard of a server of this spec."""

    def __init__(self, spec: ServerSpec) -> None:
        num_workers = spec.rule.members.size
        self._block = SharedBlock.create(loan_bytes(spec.layout, num_workers))
        mutex.prepare(self._block.tensor.data_ptr())
        self._loan = Loan(self._block.tensor, spec.layout, num_workers)
        self._num_loans = 0

    @property
    def address(self) -> BlockAddress:
        return self._block.address

    @property
    def iteration(self) -> int:
        """Of the shard when it was last a worker's."""
        return self._loan.iteration

    def lend(self, part: Part, gradients: Sequence[Sequence[int]]) -> None:
        """The quiet shard is the workers' from now on, unless it cannot be told them what they must know.

        Args:
            gradients: where each worker's lie.
        """
        loan, shard = self._loan, part.shard
        states = export_state(shard.optimizer, shard.parameters)
        described = [(name, str(state.dtype).removeprefix("torch."), state.shape) for name, state in states.items()]
        rule = shard.rule
        terms = {
            "staleness": rule.staleness if isinstance(rule, StaleSynchronous) else None,
            "max_updates": shard.max_updates,
            "groups": [
                {key: value for key, value in group.items() if key != "params"}
                for group in shard.optimizer.param_groups
            ],
            "states": described,
            "gradients": gradients,
        }
        with loan.lock:
            index = 1 - loan.in_force
            version = loan.versions[index]
            try:
                loan.write_terms(json.dumps(terms).encode())
                places = version.states(described)
            except (TypeError, ValueError):
                return  # hyperparameters that are no plain numbers, or a large state
            self._copy(part, states, version, places, is_lent=True)
            words = version.words
            words[ITERATION], words[NUM_APPLIED] = shard.iteration, loan.num_told
            for worker, (clock, pulled_at) in shard.clocks().items():
                start = loan.starts[worker]
                words[start + CLOCK], words[start + PULLED_AT], words[start + HAS_PUSHED] = clock, pulled_at, 0
            loan.put_in_force(index)
            self._num_loans += 1
            loan.number = self._num_loans

    def take_back(self, part: Part) -> list[Applied]:
        """The shard is the server's again. Workers whose gradients wait for others push them to the server.

        Returns the gradients applied since they were last looked for.
        """
        loan, shard = self._loan, part.shard
        if not loan.number:
            return []
        with loan.lock:
            loan.number = 0
            index = loan.in_force
            loan.put_in_force(index)
        futex.wake(loan.events_address)
        version = loan.versions[index]
        places = version.states(json.loads(loan.read_terms())["states"])
        self._copy(part, export_state(shard.optimizer, shard.parameters), version, places, is_lent=False)
        words = version.words
        clocks = {worker: (words[at + CLOCK], words[at + PULLED_AT]) for worker, at in enumerate(loan.starts)}
        shard.resume(words[ITERATION], clocks)
        return loan.take_notes()

    def look(self) -> list[Applied]:
        """The gradients that workers have applied since this was last asked."""
        return self._loan.take_notes()

    def close(self) -> None:
        self._block.close()

    def _copy(
        self, part: Part, states: dict[str, Tensor], version: Version, places: dict[str, Tensor], *, is_lent: bool
    ) -> None:
        """Parameters and the optimizer's state, to the version or from it."""
        shared = [piece.view(self._loan.layout, version.parameters) for piece in part.pieces]
        pairs = [*zip(part.shard.parameters, shared, strict=True), *((states[name], places[name]) for name in places)]
        for own, lent in pairs:
            if is_lent:
                lent.copy_(own)
            else:
                own.copy_(lent)
