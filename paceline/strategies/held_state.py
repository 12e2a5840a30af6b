"""The optimizer's state while servers hold it: what a script saves and loads through its own optimizer."""

from collections import defaultdict
from collections.abc import Mapping
from typing import Any, Protocol, final

import torch
from torch import Tensor

from paceline.comm.base import Collective
from paceline.errors import UsageError
from paceline.server.state import export_state, import_state
from paceline.strategies.replica import Replica


class StateHolder(Protocol):
    """Who has the optimizer's state."""

    def optimizer_state(self) -> dict[str, Tensor]:
        """See `Store.optimizer_state`."""

    def load_state(self, state: Mapping[str, Tensor], *, iteration: int) -> None:
        """See `Store.load_state`."""


@final
class HeldState:
    """Has `optimizer.state_dict()` give the servers' state, in torch's layout, and gives them what a script loaded.

    Between the two the worker's own optimizer holds none, and refuses a script that looks into it or empties it.
    """

    def __init__(self, holder: StateHolder, replica: Replica, collective: Collective) -> None:
        self._holder, self._replica, self._collective = holder, replica, collective
        self._has_begun = False
        self._nothing = _Elsewhere(collective.rank)
        optimizer = replica.optimizer
        self._hooks = [
            optimizer.register_state_dict_pre_hook(self._fetch),
            optimizer.register_state_dict_post_hook(self._let_go),
            optimizer.register_load_state_dict_post_hook(self._require_early),
        ]

    def hand_over(self, *, iteration: int) -> None:
        """Give the servers the state that the optimizer came with, or that was loaded into it. Collective call, before
        the first exchange.

        Raises:
            UsageError: only some ranks have a state, or it cannot be sent.
        """
        optimizer = self._replica.optimizer
        has_own = optimizer.state is not self._nothing and _has_stepped(optimizer)
        has_state = self._collective.all_gather_object(has_own)
        if any(has_state):
            if not all(has_state):
                raise UsageError(
                    f"the optimizer of rank {has_state.index(True)} has a state and that of rank "
                    f"{has_state.index(False)} has none; load it on every rank"
                )
            state = export_state(optimizer, self._replica.parameters)
            self._holder.load_state(state, iteration=iteration)
        self.take_up()

    def take_up(self) -> None:
        """The servers have a state already, whatever the optimizer came with."""
        self.drop()
        self._has_begun = True

    def drop(self) -> None:
        """What the servers hold is what counts."""
        self._replica.optimizer.state = self._nothing

    def require_untouched(self) -> None:
        """Raises UsageError if the script has given the optimizer another state."""
        if self._has_begun and self._replica.optimizer.state is not self._nothing:
            raise self._nothing.refusal()

    def close(self) -> None:
        self._replica.optimizer.state = defaultdict(dict)
        for hook in self._hooks:
            hook.remove()

    def _fetch(self, optimizer: torch.optim.Optimizer) -> None:
        if self._has_begun:
            optimizer.state = defaultdict(dict)
            import_state(optimizer, self._replica.parameters, self._holder.optimizer_state())

    def _let_go(self, optimizer: torch.optim.Optimizer, _: dict[str, Any]) -> None:
        if self._has_begun:
            self.drop()

    def _require_early(self, _: torch.optim.Optimizer) -> None:
        if self._has_begun:
            self.drop()
            raise UsageError(
                f"rank {self._collective.rank} loads its optimizer's state after the first batch, when the servers "
                "hold it; call optimizer.load_state_dict before the training loop, or use all-reduce"
            )


@final
class _Elsewhere(defaultdict[Any, Any]):
    """An optimizer's state that servers hold."""

    def __init__(self, rank: int) -> None:
        super().__init__(dict)
        self._rank = rank

    def refusal(self) -> UsageError:
        return UsageError(
            f"rank {self._rank}: the script changes or reads optimizer.state, which the servers hold; read it with "
            "optimizer.state_dict(), set it with load_state_dict before the training loop, or use all-reduce"
        )

    def __missing__(self, key: Any) -> Any:
        raise self.refusal()

    def __setitem__(self, key: Any, value: Any) -> None:
        raise self.refusal()

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise self.refusal()

    clear = pop = popitem = update = setdefault = get = keys = values = items = _refuse
    __iter__ = __contains__ = __delitem__ = _refuse

    def __reduce__(self) -> tuple[Any, ...]:
        return defaultdict, (dict,)


def _has_stepped(optimizer: torch.optim.Optimizer) -> bool:
    """Some optimizers, such as Adagrad, have a state from the start."""
    return any(float(state.get("step", 1)) > 0 for state in optimizer.state.values() if state)
