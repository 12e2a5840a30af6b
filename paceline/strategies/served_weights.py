"""Weights of which servers hold the rows: a script's `nn.Embedding(sparse=True)`, which it sees whole as ever.

A worker gives the servers its gradients of rows, and takes the rows that they have updated since. So wherever the
script looks at the weight (in forward(), an evaluation or `state_dict()`), it is what the servers have.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, final

import torch
from torch import Tensor, nn

from paceline.comm.base import Store
from paceline.errors import UsageError
from paceline.server.tables.changes import Changes
from paceline.server.tables.row_optimizers import with_lr
from paceline.server.tables.spec import RowGradients, TableSpec
from paceline.strategies.by_rows import moved_by_rows, row_optimizer_of
from paceline.strategies.replica import Replica
from paceline.strategies.sparse_gradients import rows_of

_MOST_ELEMENTS = 2**20
_STATE = {"sum": "sum", "mean": "exp_avg", "square": "exp_avg_sq"}
"""What servers keep of a row, and what torch's optimizers call it."""


def served_by_rows(replica: Replica) -> frozenset[int]:
    """The places of parameters that servers can hold as rows, and update as the script's optimizer would."""
    return frozenset(index for index in moved_by_rows(replica) if _fits(replica.parameters[index]))


def _fits(parameter: nn.Parameter) -> bool:
    return parameter.dtype in (torch.float32, torch.float64) and parameter.shape[1] <= _MOST_ELEMENTS


class WeightsHome(Protocol):
    """Who has the rows of a weight."""

    def state(self) -> dict[str, Tensor]:
        """See `Table.state`."""

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Go on from there. Collective call; rank 0's counts."""


@final
class ServedWeight:
    """One parameter of a replica, at this place."""

    def __init__(self, replica: Replica, index: int) -> None:
        rule, parameter = row_optimizer_of(replica, index), replica.parameters[index]
        assert rule is not None
        self.index = index
        num_rows, dim = parameter.shape
        self.spec = TableSpec(replica.specs[index].name, num_rows, dim, rule, std=0.0, dtype=parameter.dtype)
        self._replica, self._parameter = replica, parameter
        self._home: WeightsHome | None = None

    def move_to(self, home: WeightsHome) -> None:
        """The rows are there from now on."""
        self._home = home
        self.load_state({})

    def take_gradients(self) -> RowGradients | None:
        """What the next step gives the servers; none: the script has not used the weight."""
        gradient = self._parameter.grad
        if gradient is None:
            return None
        if not gradient.is_sparse and type(self._replica.optimizer) is torch.optim.SparseAdam:
            raise UsageError(
                f"the gradient of {self.spec.name!r} is dense, and SparseAdam takes sparse ones alone; use the weight "
                "in its layer alone, or another optimizer"
            )
        keys, values = rows_of(gradient, name=self.spec.name)
        return RowGradients(keys.cpu(), values.cpu())

    @property
    def changed_lr(self) -> float | None:
        """What the script has set the learning rate to; none: it has not. Raises UsageError if it has changed what
        servers go on with."""
        rule = row_optimizer_of(self._replica, self.index)
        if rule is None or with_lr(self.spec.optimizer, rule.lr) != rule:
            raise UsageError(
                f"the script changes how rows of {self.spec.name!r} are updated from {self.spec.optimizer} to "
                f"{rule or 'something else'}, of which only the learning rate may change; set the optimizer up before "
                "prepare, or use all-reduce"
            )
        return None if rule == self.spec.optimizer else rule.lr

    def take(self, changes: Changes) -> None:
        """The servers have these rows now."""
        own = self._parameter.data
        own.index_copy_(0, changes.keys.to(own.device), changes.rows.to(own.device))

    def kept(self) -> Tensor:
        return self._parameter.detach().clone()

    def put_back(self, kept: Tensor) -> None:
        self._parameter.data.copy_(kept)

    def optimizer_state(self) -> dict[str, Tensor]:
        """As torch's optimizer has it, in full tensors by its names."""
        assert self._home is not None
        given = self._home.state()
        state = {_STATE[name]: given[name] for name in self.spec.optimizer.state}
        return {**state, "step": given["updates"].float()} if state else {}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Have the servers go on with this weight, and with what `optimizer_state` has given, as far as it is there.
        Collective call."""
        assert self._home is not None
        kept: dict[str, Any] = {
            name: state[_STATE[name]].cpu() if _STATE[name] in state else self._beginning(value)
            for name, (_, value) in self.spec.optimizer.state.items()
        }
        kept["updates"] = torch.tensor(int(state.get("step", 0)))
        rows = self._parameter.detach().cpu()
        self._home.load({"keys": torch.arange(len(rows)), "rows": rows, "seed": torch.tensor(0), **kept})

    def _beginning(self, value: float) -> Tensor:
        return torch.full(self._parameter.shape, value, dtype=self._parameter.dtype)


@final
class ServedState:
    """The state of a worker's optimizer where servers have it: in their shards, and beside the rows of weights."""

    def __init__(self, store: Store, weights: Sequence[ServedWeight]) -> None:
        self._store, self._weights = store, weights

    def optimizer_state(self) -> dict[str, Tensor]:
        """See `Store.optimizer_state`."""
        state = self._store.optimizer_state()
        for weight in self._weights:
            state |= {f"{weight.index}.{name}": tensor for name, tensor in weight.optimizer_state().items()}
        return state

    def load_state(self, state: Mapping[str, Tensor], *, iteration: int) -> None:
        """See `Store.load_state`; of weights their rows, too."""
        self._store.load_state(state, iteration=iteration)
        for weight in self._weights:
            start = f"{weight.index}."
            weight.load_state(
                {name.removeprefix(start): tensor for name, tensor in state.items() if name.startswith(start)}
            )
