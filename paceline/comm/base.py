"""The two ways to move tensors: among peers (`Collective`) and to and from servers (`Store`)."""

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, final

from torch import Tensor

from paceline.comm.objects import decode_object, encode_object
from paceline.errors import TensorMismatch
from paceline.layout import Layout
from paceline.row_file import RowFile
from paceline.server.coded_push import PushCoding
from paceline.server.spec import OptimizerSpec, Push, Reply
from paceline.server.tables.changes import Changes
from paceline.server.tables.kept_rows import Keeping
from paceline.server.tables.spec import RowGradients, TableSpec

ReduceOp = Literal["sum", "mean", "min", "max", "product"]
REDUCE_OPS: tuple[ReduceOp, ...] = ("sum", "mean", "min", "max", "product")


@dataclass
class Timing:
    """Running totals of one worker's exchange; a step's share is the difference of two readings."""

    communication_s: float = 0.0
    """Time in which this worker moved or reduced data, or had others do so for it."""
    waiting_s: float = 0.0
    """Time in which this worker was ready and a peer was not."""
    moved_bytes: int = 0
    """Bytes this worker sent or read from peers and servers."""
    hidden_s: float = 0.0
    """Time in which data moved behind this worker's own computing: in neither of the above."""


class NonFinite(NamedTuple):
    """Where a mean is NaN or infinite, and through whom."""

    element: int
    """The first of the flat tensor."""
    rank: int


class Work(ABC):
    """A collective operation under way."""

    @property
    def nonfinite(self) -> NonFinite | None:
        """What the work of a `watched_mean` has found, once it is over; the same on every rank."""
        return None

    @property
    def is_lost(self) -> bool:
        """Whether a receive that is over got nothing: its message was sent once and lost, and the tensor is as
        before."""
        return False

    @abstractmethod
    def poll(self) -> bool:
        """Advance as far as possible without blocking; true once the result is in place."""

    @abstractmethod
    def wait(self) -> None:
        """Block until the result is in place. Raises PeerLost, DeadlineExceeded or Aborted, which name the rank."""


@final
class Finished(Work):
    """The work of an operation that was complete when it returned."""

    def poll(self) -> bool:
        return True

    def wait(self) -> None:
        return None


class Collective(ABC):
    """Operations in which every rank of a world takes part, in the same order on every rank.

    Tensors may have any dtype, shape and strides. Every blocking call ends within the deadline that the
    implementation was built with, or raises `PeerLost`, `DeadlineExceeded` or `Aborted`.
    """

    rank: int
    size: int
    timing: Timing
    can_receive_first: bool = True
    """Whether two ranks that exchange messages may both receive before they send."""

    @abstractmethod
    def allocate(self, num_bytes: int) -> Tensor:
        """A zeroed uint8 tensor of `num_bytes` in the memory that this collective moves fastest.

        Collective call: every rank asks for the same size, in the same order. Views of the result are
        reduced where they lie.
        """

    @abstractmethod
    def all_reduce(self, tensor: Tensor, *, op: ReduceOp = "sum") -> Work:
        """Start to reduce `tensor` over all ranks, in place; bitwise the same result on every rank.

        `mean` of an integer tensor truncates towards zero. float16 and bfloat16 are accumulated in float32.
        """

    def persistent_all_reduce(self, tensor: Tensor, *, op: ReduceOp = "sum") -> Callable[[], Work]:
        """An all-reduce of this tensor that every call starts anew (MPI 4.0, section 6.13: persistent collectives).

        Implementations may prepare here what every start needs. One must be over before the next is started.
        """
        return functools.partial(self.all_reduce, tensor, op=op)

    def watched_mean(self, tensor: Tensor) -> Callable[[], Work] | None:
        """As `persistent_all_reduce`, of works that tell whether the mean is finite; None where that is not seen."""
        return None

    def mean_across(self, tensor: Tensor, cross: "Cross", *, is_whole: bool) -> Callable[[], Work]:
        """What averages `tensor`, which is in memory from `allocate`, in place each time it is called: the ranks of a
        host join theirs, then hosts by what `cross` prepares, then the ranks of a host get the result. By default
        each rank is on a host of its own.

        Args:
            cross: given the ranks, of different hosts, who hold the same share of a host's tensor, and the share,
                prepares its average among them. It is not asked of a rank that holds no share.
            is_whole: one rank of a host is to hold everything.
        """
        return cross(self, tensor)

    @abstractmethod
    def broadcast(self, tensor: Tensor, *, root: int = 0) -> None:
        """Overwrite `tensor` with the root's, in place; shape and dtype must agree."""

    @abstractmethod
    def gather(self, tensor: Tensor, *, root: int = 0) -> list[Tensor] | None:
        """Every rank's tensor, in rank order, on the root; None elsewhere.

        Shapes may differ between ranks, dtypes may not.
        """

    @abstractmethod
    def scatter(self, tensors: Sequence[Tensor] | None, *, root: int = 0) -> Tensor:
        """The tensor that the root gives for this rank.

        The root gives `size` tensors of one dtype, whose shapes may differ; the others give None.
        """

    @abstractmethod
    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Every rank's tensor, in rank order; shapes may differ between ranks, dtypes may not."""

    @abstractmethod
    def reduce_scatter(self, tensors: Sequence[Tensor], *, op: ReduceOp = "sum") -> Tensor:
        """Reduce the i-th tensors of all ranks for rank i and return this rank's; `size` tensors each."""

    @abstractmethod
    def send(self, tensor: Tensor, *, destination: int) -> Work:
        """Start to send `tensor` to one rank, which must `recv` one of the same shape and dtype."""

    def send_once(self, tensor: Tensor, *, destination: int) -> Work:
        """As `send`, where networks may lose the message: the receiver then takes it for lost when it should be there.
        By default none is."""
        return self.send(tensor, destination=destination)

    @abstractmethod
    def recv(self, tensor: Tensor, *, source: int) -> Work:
        """Start to overwrite `tensor` with what the source sends.

        Several may be under way; those from one source take its messages, and are over, in the order of the calls.
        """

    @abstractmethod
    def all_to_all(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Send the i-th tensor to rank i; return what every rank sent here, in rank order."""

    @abstractmethod
    def barrier(self) -> None:
        """Return once every rank has called."""

    @abstractmethod
    def set_deadline(self, deadline_s: float | None) -> None:
        """Change how long any one call may wait for a peer that lives; none: for ever."""

    def standing(self) -> str | None:
        """Says which other rank waits for all ranks in an operation that this rank has not begun. None: no rank does,
        or this one cannot see it without asking."""
        return None

    def be_through(self) -> None:
        """This rank trains no more: wherever it waits for all, others may take their time to come there."""

    completes_alike: ClassVar[bool] = False
    """Whether an operation that one rank has completed can be completed by all, whoever dies."""

    def lose(self, reason: str) -> None:
        """Somebody else has found out that a rank is gone: end every wait with `PeerLost(reason)`; callable from any
        thread. Does nothing where ranks notice by themselves at once."""

    @abstractmethod
    def abort(self, reason: str) -> None:
        """End every present and future wait of this process with `Aborted(reason)`; callable from any thread."""

    @abstractmethod
    def close(self) -> None:
        """Give back memory, sockets and threads; a second call does nothing."""

    @final
    def all_gather_object(self, value: Any) -> list[Any]:
        """Every rank's value, in rank order: plain Python data and tensors only. Raises TypeError for anything else."""
        return [decode_object(raw) for raw in self.all_gather(encode_object(value))]

    @final
    def gather_object(self, value: Any, *, root: int = 0) -> list[Any] | None:
        """As `all_gather_object`, on the root; None elsewhere."""
        gathered = self.gather(encode_object(value), root=root)
        return [decode_object(raw) for raw in gathered] if gathered is not None else None

    @final
    def broadcast_object(self, value: Any, *, root: int = 0) -> Any:
        """The root's value, on every rank; what the others pass is ignored."""
        mine = encode_object(value if self.rank == root else None)
        return decode_object(self.all_gather(mine)[root])

    @final
    def require_equal(self, what: str, value: Any) -> None:
        """Raises TensorMismatch on every rank, naming the first that differs from rank 0, unless all are equal."""
        values = self.all_gather_object(value)
        for rank, other in enumerate(values):
            if other != values[0]:
                raise TensorMismatch(f"{what} differs between ranks: rank 0 has {values[0]}, rank {rank} has {other}")


Cross = Callable[[Collective, Tensor], Callable[[], Work]]
"""Prepares what averages a tensor over a group in place, each time it is called."""


class Store(ABC):
    """A group of servers that own the model's parameters, seen from one worker."""

    timing: Timing
    is_coded: bool = False
    """Some worker's pushes go through a codec; known once it is attached."""

    @abstractmethod
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
        """Hand the servers the layout, the optimizer and (from rank 0) the initial parameters.

        Collective call. `parameters` and `gradients` are uint8 buffers of `layout.num_bytes` made by `allocate`;
        later calls read gradients from and write parameters to them. Where `coding` has servers read gradients here
        themselves, an exchange leaves there what its codec makes of them. Servers that are to hold rows, too, may be
        left without parameters.

        Raises:
            UsageError: there are not enough parameters for each server.
        """

    @abstractmethod
    def allocate(self, num_bytes: int) -> Tensor:
        """A zeroed uint8 tensor in memory that servers on this host reach without a copy."""

    def expect_alike(self) -> None:
        """All workers push at every step: a long wait for others looks whether they wait for this worker elsewhere,
        where it can see that."""

    @abstractmethod
    def exchange(self, push: Push) -> Reply:
        """Push what lies in `gradients`, wait for admission, and have the current parameters written in place."""

    @abstractmethod
    def wait_for_admission(self, *, pause_at: int) -> Reply:
        """Without a gradient, wait to be admitted and have the current parameters written in place."""

    @abstractmethod
    def pull(self) -> int:
        """Write the current parameters in place at once, without admission; returns the iteration. This is to look at
        them: staleness counts from the last answer to a push, or to a wait."""

    @abstractmethod
    def how_far(self) -> int:
        """The iteration that the servers are at."""

    @abstractmethod
    def leave(self) -> None:
        """Tell the servers that this worker pushes no more, so that nobody waits for it."""

    @abstractmethod
    def step_aside(self) -> None:
        """Tell the servers that this worker waits for all others at a place of their scripts, and pushes nothing
        before it comes back."""

    @abstractmethod
    def come_back(self) -> None:
        """Tell the servers that it goes on. All workers do so before one of them pushes."""

    @abstractmethod
    def optimizer_state(self) -> dict[str, Tensor]:
        """The servers' optimizer state as full tensors, keyed `<parameter index>.<state name>`."""

    @abstractmethod
    def open_tables(self, specs: Sequence[TableSpec], *, keeping: Keeping | None = None) -> "TableStore":
        """Have the servers hold these tables, whose rows are updated with the model. Collective call, once, before the
        first exchange.

        Args:
            keeping: this worker uses rows that it has asked for again, for so long; none: it asks each time.
        """

    @abstractmethod
    def load_state(self, state: Mapping[str, Tensor], *, iteration: int) -> None:
        """Have the servers continue at `iteration` with this optimizer state and rank 0's parameters.

        Collective call, before the first exchange.
        """

    @abstractmethod
    def abort(self, reason: str) -> None:
        """End every present and future wait of this process with `Aborted(reason)`; callable from any thread."""

    @abstractmethod
    def close(self) -> None:
        """Give back memory and sockets; a second call does nothing."""


class TableStore(ABC):
    """The tables that servers hold, seen from one worker; each is known by its number."""

    num_read: int = 0
    """Rows that this worker has read."""
    num_kept: int = 0
    """How many of these it took from copies that it had."""

    @abstractmethod
    def read(self, wanted: Mapping[int, Tensor], *, is_fresh: bool) -> dict[int, Tensor]:
        """The rows of each table's keys, shape (keys, dim). Keys are int64, of a table none twice.

        Args:
            is_fresh: as they are now; else a copy counts that may be used still.
        """

    def look(self, table: int, keys: Tensor) -> Tensor | None:
        """The rows of these keys as they are now, in memory that this process sees, shape (keys, dim); none: they are
        to be `read`. Keys are int64, and may come more than once."""
        return None

    @abstractmethod
    def read_ahead(self, wanted: Mapping[int, Tensor]) -> None:
        """Start fetching these rows for the next `read`. That `read` returns current rows, and may ask for other
        keys."""

    @abstractmethod
    def push(
        self,
        gradients: Sequence[RowGradients | None],
        *,
        weight: float,
        lrs: Sequence[float | None] = (),
        are_finite: bool = False,
    ) -> None:
        """Give the servers gradients of every table's rows, none where it was not used. They become part of the update
        that this worker's next `Store.exchange` is for, in which they have this weight.

        Args:
            lrs: for each table, the learning rate; none, also as a whole: its optimizer's own.
            are_finite: the caller has looked.
        """

    @abstractmethod
    def changed(self, tables: Sequence[int], *, looks: bool = False) -> dict[int, Changes]:
        """Rows that have changed since this worker asked last, as they are now. At the first time there are none: a
        worker that asks before the first update, and then after each exchange, has all rows as the servers do. One that
        only `looks` is given them again when it next asks."""

    @abstractmethod
    def state(self, table: int) -> dict[str, Tensor]:
        """Every row that was ever updated, with its optimizer's state: see `Table.state`."""

    @abstractmethod
    def counts(self, table: int) -> dict[str, int]:
        """Add up what all servers have of this table: see `Table.counts`."""

    @abstractmethod
    def load(self, table: int, state: Mapping[str, Tensor]) -> None:
        """Have the servers continue with the state that rank 0 gives. Collective call; where a worker that joins others
        calls it, servers keep what they have."""

    @abstractmethod
    def save(self, table: int, directory: Path) -> list[RowFile]:
        """Have each server write its rows to files in a directory that all of them see. Raises NotWritten."""

    @abstractmethod
    def load_files(self, table: int, directory: Path, files: Sequence[RowFile]) -> None:
        """Have the servers continue with the rows of these files. Collective call, as `load`."""
