"""What a key-value store is: its keys, what each holds, who may change it how, and when."""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from paceline.errors import UsageError, unknown
from paceline.membership import Membership
from paceline.server.admission import AdmissionRule, BulkSynchronous, StaleSynchronous

MOST_KEYS = 2**63 - 1
Change = Callable[[Tensor, Tensor], None]
"""Changes rows in place, shape (keys, dim + state), by what was pushed, shape (keys, dim)."""
_RULES: Mapping[str, Callable[..., AdmissionRule]] = {
    "asp": StaleSynchronous,
    "ssp": StaleSynchronous,
    "bsp": BulkSynchronous,
}


class Pairs(NamedTuple):
    """Some keys and what they hold."""

    keys: Tensor
    """int64 of shape (keys,), ascending."""
    values: Tensor
    """Shape (keys, dim)."""


@final
@dataclass(frozen=True)
class Function:
    """A function of the user's that runs on the servers, which import it: no code comes over the network.

    It is called as `function(rows, pushed, **options)` and changes the rows in place.

    Args:
        path: `module:name`, which servers can import.
        over_range: it is given every key of the push's range that holds something, with 0 for those that were not
            pushed; else the pushed keys alone.
        options: further arguments, by name.
    """

    path: str
    over_range: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)


@final
@dataclass(frozen=True, kw_only=True)
class Spec:
    """A store of `num_keys` keys, each with `dim` numbers, on servers that own contiguous ranges of them.

    Args:
        state: further numbers a key has, which only functions on the servers see.
        functions: by the name that pushes give; `add` and `assign` are there already.
        rule: when a push counts and who may go on: `asp`, `ssp`, `bsp`, or the `module:name` of what makes an
            `AdmissionRule` of the members.
        rule_options: its arguments, by name, such as `staleness` of `ssp`.

    Raises:
        UsageError: a number is out of range, or a setting would have no effect.
    """

    servers: int
    workers: int
    num_keys: int = MOST_KEYS
    dim: int = 1
    state: int = 0
    dtype: torch.dtype = torch.float32
    functions: Mapping[str, Function] = field(default_factory=dict)
    rule: str = "asp"
    rule_options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, least in (("servers", 1), ("workers", 1), ("num_keys", self.servers), ("dim", 1), ("state", 0)):
            value = getattr(self, name)
            if type(value) is not int or not least <= value <= MOST_KEYS:
                raise UsageError(f"{name} of a store must be a whole number from {least} on, not {value!r}")
        if taken := _GIVEN.keys() & self.functions.keys():
            raise UsageError(f"a store has a function {min(taken)!r} already; give yours another name")
        if self.rule == "asp" and self.rule_options:
            raise UsageError(f"rule 'asp' has no options, not {dict(self.rule_options)}; 'ssp' has a staleness")
        if not self.dtype.is_floating_point:
            raise UsageError(f"a store holds floating-point numbers, not {self.dtype}")

    @property
    def bounds(self) -> list[int]:
        """Server i owns keys `bounds[i]` to `bounds[i + 1]` (Li et al., OSDI 2014, section 4.1)."""
        return [self.num_keys * index // self.servers for index in range(self.servers + 1)]

    def change(self, name: str) -> Change:
        """The function of this name. Raises UsageError if there is none, or it cannot be imported."""
        if name in _GIVEN:
            return _GIVEN[name]
        if name not in self.functions:
            raise unknown("function", name, [*_GIVEN, *self.functions])
        function = self.functions[name]
        return partial(load(function.path), **function.options)

    def admission_rule(self) -> AdmissionRule:
        """A fresh one, for one server. Raises UsageError if it cannot be made, or needs servers to agree."""
        make = _RULES[self.rule] if self.rule in _RULES else load(self.rule)
        if self.rule == "ssp" and "staleness" not in self.rule_options:
            raise UsageError("rule 'ssp' needs a bound: rule_options={'staleness': 2}")
        try:
            rule = make(Membership.first(self.workers), **self.rule_options)
        except (TypeError, ValueError) as error:
            raise UsageError(f"rule {self.rule!r} of a store cannot be made: {error}") from None
        if not isinstance(rule, AdmissionRule) or rule.is_timed or (rule.contributors is not None and self.servers > 1):
            raise UsageError(
                f"rule {self.rule!r} of a store must be an AdmissionRule that needs no timer and, with several "
                "servers, decides alike in whatever order pushes arrive"
            )
        return rule


def load(path: str) -> Callable[..., Any]:
    """What `module:name` names. Raises UsageError if there is no such thing to call."""
    module, colon, name = path.partition(":")
    try:
        found = getattr(importlib.import_module(module), name) if colon else None
    except (ImportError, AttributeError, ValueError) as error:
        raise UsageError(f"servers cannot import {path!r}: {error}") from None
    if not callable(found):
        raise UsageError(f"{path!r} names nothing to call; give 'module:name'")
    return found  # type: ignore[no-any-return]


def _add(rows: Tensor, pushed: Tensor) -> None:
    rows[:, : pushed.shape[1]] += pushed


def _assign(rows: Tensor, pushed: Tensor) -> None:
    rows[:, : pushed.shape[1]] = pushed


_GIVEN: Mapping[str, Change] = {"add": _add, "assign": _assign}
