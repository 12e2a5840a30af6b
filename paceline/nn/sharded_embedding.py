"""An embedding whose rows are not among the model's parameters: servers hold them, or this process alone."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar, final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.errors import UsageError
from paceline.row_file import RowFile
from paceline.server.tables.row_optimizers import RowOptimizer, of_text, with_lr
from paceline.server.tables.spec import RowGradients, TableSpec, are_different, summed
from paceline.server.tables.table import Table

T = TypeVar("T")
_ANCHOR = torch.empty(0, requires_grad=True)
"""Rows are made from it, so that backward comes to them."""


class Watch(Protocol):
    """Who looks at what a worker's script does with tables."""

    def reads(self, table: "ShardedEmbedding") -> None:
        """The script is about to read rows for which backward may find gradients."""

    def updates(self, table: "ShardedEmbedding") -> None:
        """The script itself is about to update rows in this process."""


watch: ContextVar[Watch | None] = ContextVar("watch_of_tables", default=None)
"""Of the worker that runs here: virtual ones have a context each."""


class Holder(Protocol):
    """Who has a table's rows."""

    def state(self) -> dict[str, Tensor]:
        """See `Table.state`."""

    def counts(self) -> dict[str, int]:
        """See `Table.counts`."""

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Go on from what `state` has given."""

    def save(self, directory: Path) -> list[RowFile]:
        """See `TableStore.save`."""

    def load_files(self, directory: Path, files: Sequence[RowFile]) -> None:
        """See `TableStore.load_files`."""


class Home(Holder, Protocol):
    """Where a table's rows are, if not in this process."""

    def expect(self, keys: Tensor) -> None:
        """These keys' rows are read next, so that the first of several tables to read can bring the others' rows."""

    def expect_next(self, keys: Tensor) -> None:
        """These keys' rows are read with the next batch, so that they can be under way while the script trains on the
        present one."""

    def expect_others(self) -> None:
        """The batch that `expect_next` was told of does not come."""

    def look(self, keys: Tensor) -> Tensor | None:
        """The rows of these keys as they are now, shape (keys, dim), where they lie in memory that this process sees.
        Keys may come more than once. None: the rows are to be `read`."""

    def read(self, keys: Tensor, *, is_fresh: bool) -> Tensor:
        """The rows of these keys, none twice, shape (keys, dim); if `is_fresh`, as they are now."""


@final
class ShardedEmbedding(nn.Module):
    """A table of rows that are looked up by key, as `nn.Embedding(sparse=True)` does, for more rows than a host holds.

    Under `ps-bsp`, `ps-ssp` and `ps-asp` the servers hold the rows, each those in its range of the hashed keys (Li et
    al., "Scaling Distributed Machine Learning with the Parameter Server", OSDI 2014), and update them with the model's
    parameters. A worker reads the rows of its batch in forward(). It gives their gradients when the prepared optimizer
    steps, of several the first. Under `single` they are in this process. A row takes memory from its first update on;
    before that its values follow from its key. Keys never share a row.

    The optimizer of the script has no part in it: give the table one of its own.

    Args:
        num_rows: keys are 0 to num_rows - 1, at most 2**63 - 1.
        dim: elements of a row.
        optimizer: of the rows, such as `paceline.nn.Adagrad(lr=0.1)`, or its text `"adagrad:lr=0.1"`.
        name: by which errors and checkpoints know the table; a model's tables have different ones.
        std: rows begin with draws from a normal distribution with this standard deviation and the mean 0.
        dtype: float32, float64, bfloat16 or float16. In the last two rows lie on the servers and move to workers; the
            script has them in float32, in which updates are made, too.
        min_count: a key's row is made by the update that is the so manieth with a gradient of it. Until then a lookup
            gives its first values, and gradients of it are dropped.
        evict_after: a row that has had no gradient for so many updates of the table is forgotten, and its key is as if
            it had never come; it is looked for such rows eight times in as many updates.
        max_rows: where there are more, those that have had no gradient for longest are forgotten, an eighth at a time.
            Each server has an equal part of the number.

    Raises:
        UsageError: an argument is out of range.

    >>> from paceline.nn import SGD
    >>> table = ShardedEmbedding(2**40, 4, optimizer=SGD(lr=0.5), name="users")
    >>> table(torch.tensor([[7, 7], [2**39, 0]])).shape
    torch.Size([2, 2, 4])
    """

    def __init__(
        self,
        num_rows: int,
        dim: int,
        *,
        optimizer: RowOptimizer | str,
        name: str = "embedding",
        std: float = 1.0,
        dtype: torch.dtype = torch.float32,
        min_count: int = 1,
        evict_after: int | None = None,
        max_rows: int | None = None,
    ) -> None:
        super().__init__()
        rule = of_text(optimizer) if isinstance(optimizer, str) else optimizer
        seed = int(torch.randint(2**62, ()))  # the script's generator, which is at the same place on every worker
        self.spec = TableSpec(name, num_rows, dim, rule, std, seed, dtype, min_count, evict_after, max_rows)
        self._own = Table(self.spec)
        self._home: Home | None = None
        self.changed_lr: float | None = None
        """What the script has set the learning rate to; none: it has not."""
        self._found: list[RowGradients] = []

    def forward(self, keys: Tensor) -> Tensor:
        """Rows of shape keys.shape + (dim,), on the device of the keys.

        Raises:
            UsageError: a key is out of range or no whole number; the message names it and the table.
        """
        if self._home is not None and not torch.is_grad_enabled():
            rows = self._home.look(self.spec.checked(keys).cpu().flatten())
            if rows is not None:
                return rows.to(keys.device, self.spec.computed).view(*keys.shape, self.dim)
        unique, places = self._once(keys)
        return self._shaped(keys, self._read(unique), places)

    def bag(self, keys: Tensor, offsets: Tensor, mode: Literal["sum", "mean"] = "mean") -> Tensor:
        """The sum or mean of the rows of each bag, shape (bags, dim); of an empty one 0.

        Args:
            keys: of all bags, one after the other.
            offsets: where each bag begins.

        Raises:
            UsageError: as `forward`.
        """
        unique, places = self._once(keys)
        if places is None:
            places = torch.arange(keys.numel(), device=keys.device).view(keys.shape)
        return F.embedding_bag(places, self._read(unique), offsets, mode=mode)

    def update(self) -> None:
        """Update the rows in this process with what backward passes have found since the last time. The step of a
        prepared optimizer does so itself; a script without Paceline's worker calls it beside its own.

        Raises:
            UsageError: servers hold the rows, or a gradient is not finite; the message names the table, and the key.
        """
        if self._home is not None:
            raise UsageError(
                f"table {self.spec.name!r}: the servers update its rows, when the optimizer that was prepared steps"
            )
        watching = watch.get()
        if watching is not None:
            watching.updates(self)
        gradients = self.take_gradients()
        if gradients is not None:
            self._own.require(gradients)
            self._own.update(gradients, with_lr(self.spec.optimizer, self.changed_lr))

    def load_rows(self, state: Mapping[str, Tensor]) -> None:
        """Go on with rows that `rows` has given. Under servers it is a collective call; rank 0's rows count.

        Raises:
            UsageError: they are of another table.
        """
        self._found.clear()
        self._holder.load(state)

    def rows(self) -> dict[str, Tensor]:
        """The keys of all rows that were ever updated, in order, their rows, and their optimizer's state."""
        return self._holder.state()

    def counts(self) -> dict[str, int]:
        """How many `rows` there are, and keys that are `waiting` for one (`min_count`); how many rows were `evicted`
        and gradients `dropped`, since the run began or was resumed."""
        return self._holder.counts()

    @property
    def lr(self) -> float:
        """The learning rate of the rows' updates from here on, which the script sets as a schedule has it, on all
        workers alike. It is no part of a checkpoint. Setting it raises UsageError for one that the optimizer cannot
        have."""
        return self.spec.optimizer.lr if self.changed_lr is None else self.changed_lr

    @lr.setter
    def lr(self, lr: float) -> None:
        try:
            with_lr(self.spec.optimizer, lr)
        except ValueError as error:
            raise UsageError(f"table {self.spec.name!r}: {error}") from None
        self.changed_lr = lr

    @property
    def num_rows(self) -> int:
        return self.spec.num_rows

    @property
    def dim(self) -> int:
        return self.spec.dim

    def extra_repr(self) -> str:
        spec = self.spec
        return f"{spec.num_rows}, {spec.dim}, name={spec.name!r}, optimizer={str(spec.optimizer)!r}"

    def save_files(self, directory: Path) -> list[RowFile]:
        """Have the servers write all rows to files in a directory that they see. Raises NotWritten."""
        return self._holder.save(directory)

    def load_files(self, directory: Path, files: Sequence[RowFile]) -> None:
        """Go on with the rows of these files. Under servers it is a collective call. Raises UsageError as `load_rows`,
        or for a file that is damaged."""
        self._found.clear()
        self._holder.load_files(directory, files)

    # --- for those who hold the rows, and say when to update them -----------------------------------------------

    def move_to(self, home: Home) -> None:
        """The rows are there from now on."""
        self._home = home

    def take_gradients(self) -> RowGradients | None:
        """What backward passes have found since this was last asked, once a key; none: the table was not used."""
        found = summed(self._found) if self._found else None
        self._found.clear()
        return found

    def drop_gradients(self) -> None:
        self._found.clear()

    @property
    def has_gradients(self) -> bool:
        """Whether backward passes have found some that nobody has taken."""
        return bool(self._found)

    def rescale_gradients(self, factor: float) -> None:
        """Give what was found so far another weight."""
        self._found[:] = [RowGradients(keys, values * factor) for keys, values in self._found]

    def find_nonfinite(self) -> str | None:
        """A row whose gradient is NaN or infinite, in words; none if there is none."""
        if self._found:
            self._found[:] = [summed(self._found)]  # which may overflow
            key = self.spec.nonfinite(self._found[0])
            if key is not None:
                return f"row {key} of table {self.spec.name}"
        return None

    @property
    def _holder(self) -> Holder:
        return self._own if self._home is None else self._home

    def _once(self, keys: Tensor) -> tuple[Tensor, Tensor | None]:
        """These keys once each, and where each of the script's is among them; none: they come once, in its order."""
        keys = self.spec.checked(keys)
        if are_different(keys.cpu().flatten()):
            return keys.flatten().clone(), None  # the script may change its own before the step
        unique, places = keys.unique(return_inverse=True)
        return unique, places

    def _shaped(self, keys: Tensor, rows: Tensor, places: Tensor | None) -> Tensor:
        return rows.view(*keys.shape, self.dim) if places is None else F.embedding(places, rows)

    def _read(self, keys: Tensor) -> Tensor:
        """The rows of these keys, none of which comes twice; backward notes their gradients."""
        own, home, trains = keys.cpu(), self._home, torch.is_grad_enabled()

        def read() -> Tensor:
            rows = self._own.read(own) if home is None else home.read(own, is_fresh=not trains)
            return rows.to(keys.device, self.spec.computed)

        if not trains:
            return read()
        self._require_unscaled(keys.device.type)
        watching = watch.get()
        if watching is not None:
            watching.reads(self)
        rows: Tensor = _Noted.apply(_ANCHOR, read, partial(self._note, own))  # type: ignore[no-untyped-call]
        return rows

    def _note(self, keys: Tensor, gradient: Tensor) -> None:
        # A copy: the `grad` of a parameter may lie in the same memory, where the script or an optimizer changes it.
        self._found.append(RowGradients(keys, gradient.detach().cpu().clone()))

    def _require_unscaled(self, device: str) -> None:
        """Raises UsageError where a scaled loss is to be expected: nobody would divide the rows' gradients again."""
        if torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) is torch.float16:
            raise UsageError(
                f"table {self.spec.name!r}: automatic mixed precision in float16 scales the loss, and rows would be "
                "updated with scaled gradients; use bfloat16"
            )


def read_together(wanted: Sequence[tuple[ShardedEmbedding, Tensor]]) -> list[Tensor]:
    """What `[table(keys) for table, keys in wanted]` gives, in one request to each server.

    Raises:
        UsageError: as the tables do, or a table comes twice.
    """
    _require_once(wanted)
    once = [(table, keys, *table._once(keys)) for table, keys in wanted]
    for table, _, unique, _ in once:
        if table._home is not None:
            table._home.expect(unique.cpu())
    return [table._shaped(keys, table._read(unique), places) for table, keys, unique, places in once]


def read_ahead(batches: Iterable[T], wanted: Callable[[T], Sequence[tuple[ShardedEmbedding, Tensor]]]) -> Iterator[T]:
    """These batches, each handed out when the one after it is known, whose rows come from servers on other hosts while
    the script trains. The script gets the same rows as ever: those that have changed meanwhile come anew.

    Args:
        batches: a loader, or one pass over it.
        wanted: of a batch, the tables, each once, and the keys of one of the model's lookups in it, in their order. A
            warning says so once where there is no such lookup.

    Raises:
        UsageError: as the tables do, or a table comes twice.
    """
    present: list[T] = []
    known: Sequence[tuple[ShardedEmbedding, Tensor]] = ()
    try:
        for following in batches:
            if present:
                known = wanted(following)
                _expect_next(known)
                yield present.pop()
            present.append(following)
        yield from present
    except GeneratorExit:  # the script leaves this pass early
        for table, _ in known:
            if table._home is not None:
                table._home.expect_others()
        raise


def _expect_next(wanted: Sequence[tuple[ShardedEmbedding, Tensor]]) -> None:
    _require_once(wanted)
    for table, keys in wanted:
        if table._home is not None:
            table._home.expect_next(table._once(keys)[0].cpu())


def _require_once(wanted: Sequence[tuple[ShardedEmbedding, Tensor]]) -> None:
    for index, (table, _) in enumerate(wanted):
        if any(table is other for other, _ in wanted[:index]):
            raise UsageError(f"table {table.spec.name!r} comes twice among tables that are read together")


class _Noted(torch.autograd.Function):
    """Rows that are no leaf, so that a script may change them in place, and whose gradient is noted."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, read: Callable[[], Tensor], note: Callable[[Tensor], None]) -> Tensor:
        """`anchor`: `_ANCHOR`."""
        ctx.note = note
        return read()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None]:
        ctx.note(gradient)
        return None, None, None
