"""Strategies by the names of the command line."""

import importlib.metadata
import types
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from paceline.errors import UsageError, unknown
from paceline.strategies.all_reduce import AllReduce
from paceline.strategies.base import Strategy, option_docs
from paceline.strategies.parameter_server import ParameterServer
from paceline.strategies.single import Single


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A name of the command line: a strategy with some options fixed."""

    name: str
    strategy: type[Strategy]
    fixed: Mapping[str, Any] = field(default_factory=dict)
    leaves_out: tuple[str, ...] = ()
    """Options that have no effect with those that are fixed."""
    summary: str = ""
    alias_of: str | None = None

    @property
    def is_another_name(self) -> bool:
        """Whether it is an alias that fixes nothing of its own, as `ps-sync` does."""
        return self.alias_of is not None and self.fixed == STRATEGIES[self.alias_of].fixed

    @property
    def docs(self) -> dict[str, tuple[Any, str]]:
        """The options a user may set, with default and documentation."""
        hidden = {*self.fixed, *self.leaves_out}
        return {name: doc for name, doc in option_docs(self.strategy).items() if name not in hidden}

    @property
    def options(self) -> tuple[str, ...]:
        return tuple(self.docs)


_SYNCHRONOUS, _ASYNCHRONOUS = ("backup_workers", "combine"), ("torn_reads", "staleness")
_TRUTHS = {"true": True, "false": False}
_BSP = {"consistency": "bsp"}
_ASP = {"consistency": "asp"}

STRATEGIES: dict[str, Entry] = {}
"""Every strategy by its name on the command line."""


def register(entry: Entry) -> None:
    """Give a strategy a name for `build`, `paceline compare`, the planner and reports.

    A package does the same for the command line with an entry point of the group `paceline.strategies`.

    Raises:
        UsageError: the name is taken by another strategy.
    """
    if STRATEGIES.setdefault(entry.name, entry) != entry:
        raise UsageError(f"there is a strategy {entry.name!r} already: {STRATEGIES[entry.name].summary}")


for _entry in (
    Entry(name="single", strategy=Single, summary="one worker, no exchange: the baseline"),
    Entry(
        name="all-reduce", strategy=AllReduce, summary="gradients averaged among workers in buckets, during backward"
    ),
    Entry(
        name="ring",
        strategy=AllReduce,
        fixed={"algorithm": "ring"},
        summary="all-reduce with algorithm=ring",
        alias_of="all-reduce",
    ),
    Entry(
        name="ps-bsp",
        strategy=ParameterServer,
        fixed=_BSP,
        leaves_out=_ASYNCHRONOUS,
        summary="parameter server, bulk synchronous: one update a clock, with the mean of all gradients",
    ),
    Entry(
        name="ps-sync",
        strategy=ParameterServer,
        fixed=_BSP,
        leaves_out=_ASYNCHRONOUS,
        summary="the same as ps-bsp",
        alias_of="ps-bsp",
    ),
    Entry(
        name="ps-ssp",
        strategy=ParameterServer,
        fixed={"consistency": "ssp"},
        leaves_out=_SYNCHRONOUS,
        summary="parameter server, stale synchronous: nobody runs more than `staleness` clocks ahead",
    ),
    Entry(
        name="ps-asp",
        strategy=ParameterServer,
        fixed=_ASP,
        leaves_out=(*_SYNCHRONOUS, "staleness"),
        summary="parameter server, asynchronous: every gradient is applied on arrival, nobody waits",
    ),
    Entry(
        name="ps-async",
        strategy=ParameterServer,
        fixed=_ASP,
        leaves_out=(*_SYNCHRONOUS, "staleness"),
        summary="the same as ps-asp",
        alias_of="ps-asp",
    ),
):
    register(_entry)
for _point in importlib.metadata.entry_points(group="paceline.strategies"):
    try:
        register(_point.load())
    except Exception as error:  # whatever is broken there, everything else is to work
        warnings.warn(f"the strategy {_point.name!r} of {_point.value} cannot be loaded: {error!r}", stacklevel=1)


def parse_options(texts: Iterable[str], *, where: str) -> dict[str, str]:
    """`option=value` texts, as `build` takes them. Raises UsageError if one has another form, or comes twice."""
    options: dict[str, str] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not key or not equals:
            raise UsageError(f"{where} {text!r} is not of the form option=value")
        if key in options:
            raise UsageError(f"{where} {key} is given twice")
        options[key] = value
    return options


def build(name: str, options: Mapping[str, Any] | None = None) -> Strategy:
    """The strategy of that name; option values may be text. Raises UsageError, with near misses, for unknown ones."""
    if name not in STRATEGIES:
        raise unknown("strategy", name, STRATEGIES)
    entry = STRATEGIES[name]
    for key in options or {}:
        if key not in entry.options:
            raise unknown(f"option for {name}", key, entry.options)
    hints = get_type_hints(entry.strategy)
    given = {key: _read(key, value, hints[key]) for key, value in (options or {}).items()}
    return entry.strategy(**entry.fixed, **given)


def name_of(strategy: Strategy) -> str:
    """The command line's name for a strategy: of the entries that fit, the first that fixes most options.

    A strategy that nobody has registered goes by its class.
    """
    fitting = [
        entry
        for entry in STRATEGIES.values()
        if type(strategy) is entry.strategy
        and all(getattr(strategy, key) == value for key, value in entry.fixed.items())
    ]
    if not fitting:
        return type(strategy).__name__
    return max(fitting, key=lambda entry: len(entry.fixed)).name


def _read(name: str, value: Any, hint: Any) -> Any:
    """Text as the option's type; other values as they are."""
    if not isinstance(value, str):
        return value
    if get_origin(hint) in (Union, types.UnionType):
        if any(value in get_args(part) for part in get_args(hint)):
            return value
        hint = next(part for part in get_args(hint) if part is not type(None))
    if get_origin(hint) is Literal or hint is str:
        return value
    if hint is bool:
        if value not in _TRUTHS:
            raise UsageError(f"option {name}={value!r} is neither true nor false")
        return _TRUTHS[value]
    try:
        return hint(value)
    except ValueError:
        raise UsageError(f"option {name}={value!r} is not {'a whole number' if hint is int else 'a number'}") from None
