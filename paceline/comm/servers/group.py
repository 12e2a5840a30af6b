"""A worker's store: one request to each server, answered when the worker may go on."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, final

from torch import Tensor

from paceline.comm.base import Collective, Store, TableStore, Timing
from paceline.comm.servers.carrier import Carrier
from paceline.comm.servers.tables import ServedTables
from paceline.layout import Layout
from paceline.messages import FRAME_BYTES
from paceline.server.actions import Send
from paceline.server.client_core import ClientCore
from paceline.server.coded_push import PushCoding
from paceline.server.ranges import KeyRange, cut, require_some_for_each
from paceline.server.spec import OptimizerSpec, Push, Reply
from paceline.server.tables.kept_rows import Keeping
from paceline.server.tables.spec import TableSpec

Configure = Callable[[Layout, OptimizerSpec, Sequence[KeyRange]], None]


class Joins(NamedTuple):
    """A worker comes to servers that serve others already, and have the model."""

    rank: int
    """Servers know the worker by it. Its collective has no other member."""
    in_pieces: bool
    """Servers hold their ranges in pieces, since some worker was on another host than one of them at the start."""


@final
class ServerGroup(Store):
    """Speaks to every server at once.

    Args:
        carrier: of this worker.
        collective: of the workers, for the hand-over at the start.
        configure: has every server build its shards; called by rank 0.
        epoch: of the membership.
        joins: where this worker comes later than others.
    """

    def __init__(
        self,
        carrier: Carrier,
        *,
        collective: Collective,
        configure: Configure,
        epoch: int,
        joins: Joins | None = None,
    ) -> None:
        self.timing = Timing()
        self._carrier, self._collective, self._configure, self._epoch = carrier, collective, configure, epoch
        self._joins = joins
        self._standing: Callable[[], str | None] | None = None
        self._tables: list[ServedTables] = []
        self._client = ClientCore(
            rank=collective.rank if joins is None else joins.rank,
            epoch=epoch,
            beside=carrier.beside,
            carries_bytes=carrier.carries_bytes,
            epochs=carrier.epochs,
        )
        carrier.begin(self._client)

    def allocate(self, num_bytes: int) -> Tensor:
        return self._carrier.allocate(num_bytes)

    def attach(
        self,
        layout: Layout,
        spec: OptimizerSpec,
        parameters: Tensor,
        gradients: Tensor,
        *,
        coding: PushCoding | None = None,
        holds_rows: bool = False,
    ) -> None:
        whole = not spec.element_wise
        if not holds_rows:
            require_some_for_each(layout, num_servers=len(self._carrier.beside), whole_tensors=whole)
        # Between hosts a piece is updated, and sent back, while the next one arrives; on one host nothing is gained.
        is_remote = any(self._collective.all_gather_object(not all(self._carrier.beside)))
        in_pieces = is_remote if self._joins is None else self._joins.in_pieces
        ranges = cut(
            layout,
            num_servers=len(self._carrier.beside),
            whole_tensors=whole,
            piece_bytes=FRAME_BYTES if in_pieces else None,
        )
        if self._collective.rank == 0 and self._joins is None:
            self._configure(layout, spec, ranges)
        self._collective.barrier()
        bodies = self._carrier.bodies(parameters, gradients)
        self._ask(
            self._client.attach(
                layout,
                ranges,
                whole=whole,
                parameters=parameters,
                gradients=gradients,
                bodies=bodies,
                coding=coding,
            )
        )
        self.is_coded = any(self._collective.all_gather_object(self._client.is_coded))
        self._carrier.attached(self._client, layout, spec, self._client.attached())
        self._collective.barrier()
        if self._joins is None:
            self._initialise(iteration=0)

    @property
    def clock(self) -> int:
        """The clock that this worker's next push belongs to."""
        return self._client.clock

    def expect_alike(self) -> None:
        if self._carrier.is_all_beside:  # else one may have its answer while another's is on its way
            self._standing = self._collective.standing

    def exchange(self, push: Push) -> Reply:
        self._client.encode(push)
        self._carrier.standing = self._standing  # what else servers are asked for, they may take their time for
        try:
            turn = self._carrier.serve_itself(self._client, push) if push.is_plain else None
            if turn is None:
                reply = self._timed(self._client.exchange(push))
            else:
                self._account(turn.elapsed_s, turn.waiting_s)
                reply = turn.reply
        finally:
            self._carrier.standing = None
        self._client.settle(reply)
        for tables in self._tables:
            tables.settle(reply)
        return reply

    def wait_for_admission(self, *, pause_at: int) -> Reply:
        return self._timed(self._client.wait(pause_at=pause_at))

    def pull(self) -> int:
        self._ask(self._client.pull())
        return self._client.iteration

    def how_far(self) -> int:
        self._ask(self._client.how_far())
        return self._client.iteration

    def leave(self) -> None:
        self._ask(self._client.leave())

    def step_aside(self) -> None:
        self._ask(self._client.step_aside())

    def come_back(self) -> None:
        self._ask(self._client.come_back())

    def optimizer_state(self) -> dict[str, Tensor]:
        self._ask(self._client.get_state())
        return self._client.state()

    def load_state(self, state: Mapping[str, Tensor], *, iteration: int) -> None:
        if self._collective.rank == 0:
            self._ask(self._client.set_state(state))
        self._initialise(iteration=iteration)

    def open_tables(self, specs: Sequence[TableSpec], *, keeping: Keeping | None = None) -> TableStore:
        tables = ServedTables(
            self._carrier,
            specs,
            collective=self._collective,
            timing=self.timing,
            epoch=self._epoch,
            store=self._client,
            keeping=keeping,
            joins=self._joins is not None,
        )
        self._tables.append(tables)
        return tables

    def abort(self, reason: str) -> None:
        self._carrier.abort(reason)

    def close(self) -> None:
        self._tables.clear()
        self._client.close()
        self._carrier.close()

    def _initialise(self, *, iteration: int) -> None:
        """Rank 0 gives the servers its parameters; nobody goes on before they have them."""
        self._client.begin_at(iteration)
        if self._collective.rank == 0:
            self._ask(self._client.initialise(iteration=iteration))
        self._collective.barrier()

    def _timed(self, sends: Iterable[Send]) -> Reply:
        self._account(self._ask(sends), self._client.waiting_s)
        return self._client.reply()

    def _account(self, elapsed_s: float, waiting_s: float) -> None:
        waiting_s = min(elapsed_s, waiting_s)
        self.timing.waiting_s += waiting_s
        self.timing.communication_s += elapsed_s - waiting_s
        self.timing.moved_bytes += self._client.moved_bytes

    def _ask(self, sends: Iterable[Send]) -> float:
        """Ask, and wait; the seconds that took."""
        elapsed_s = self._carrier.carry(self._client, sends)
        self._client.require_done()
        return elapsed_s
