"""Strategies by the names of the command line."""

from __future__ import annotations

import types
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from paceline.errors import UsageError, unknown
from paceline.strategies.all_reduce import AllReduce
from paceline.strategies.base import Strategy, option_docs
from paceline.strategies.parameter_server import ParameterServer
from paceline.strategies.single import Single


@dataclass(frozen=True)
class Entry:
    """A name of the command line: a strategy with some options fixed."""

    name: str
    strategy: type[Strategy]
    fixed: Mapping[str, Any]
    options: tuple[str, ...]
    summary: str
    alias_of: str | None = None

    @property
    def is_another_name(self) -> bool:
        """Whether it is an alias that fixes nothing of its own, as `ring` does."""
        return self.alias_of is not None and self.fixed == STRATEGIES[self.alias_of].fixed

    @property
    def docs(self) -> dict[str, tuple[Any, str]]:
        """The options a user may set, with default and documentation."""
        docs = option_docs(self.strategy)
        return {name: docs[name] for name in self.options}


_PS: tuple[str, ...] = ("servers", "nonfinite")
_PS_SYNCHRONOUS = (*_PS, "backup_workers", "combine")
_PS_ASYNCHRONOUS = (*_PS, "torn_reads")
_TRUTHS = {"true": True, "false": False}
_ENTRIES = (
    Entry("single", Single, {}, ("nonfinite",), Single.summary),
    Entry("all-reduce", AllReduce, {}, ("algorithm", "bucket_mb", "nonfinite"), AllReduce.summary),
    Entry(
        "ring",
        AllReduce,
        {"algorithm": "ring"},
        ("bucket_mb", "nonfinite"),
        "all-reduce with algorithm=ring",
        alias_of="all-reduce",
    ),
    Entry(
        "ps-bsp",
        ParameterServer,
        {"consistency": "bsp"},
        _PS_SYNCHRONOUS,
        "parameter server, bulk synchronous: one update a clock, with the mean of all gradients",
    ),
    Entry("ps-sync", ParameterServer, {"consistency": "bsp"}, _PS_SYNCHRONOUS, "the same as ps-bsp", alias_of="ps-bsp"),
    Entry(
        "ps-ssp",
        ParameterServer,
        {"consistency": "ssp"},
        (*_PS_ASYNCHRONOUS, "staleness"),
        "parameter server, stale synchronous: nobody runs more than `staleness` clocks ahead",
    ),
    Entry(
        "ps-asp",
        ParameterServer,
        {"consistency": "asp"},
        _PS_ASYNCHRONOUS,
        "parameter server, asynchronous: every gradient is applied on arrival, nobody waits",
    ),
    Entry(
        "ps-async", ParameterServer, {"consistency": "asp"}, _PS_ASYNCHRONOUS, "the same as ps-asp", alias_of="ps-asp"
    ),
)
STRATEGIES: Mapping[str, Entry] = {entry.name: entry for entry in _ENTRIES}


def parse_options(texts: Iterable[str], *, where: str) -> dict[str, str]:
    """`option=value` texts, as `build` takes them.

    Raises:
        UsageError: a text has another form, or an option comes twice; the message begins with `where`.
    """
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
    """The strategy of that name; option values may be text, as on the command line.

    Raises:
        UsageError: the name, an option or a value is unknown; the near miss is suggested.
    """
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
    """The command line's name for a strategy: of the entries that fit, the first that fixes most options."""
    fitting = [
        entry
        for entry in STRATEGIES.values()
        if type(strategy) is entry.strategy
        and all(getattr(strategy, key) == value for key, value in entry.fixed.items())
    ]
    if not fitting:
        raise unknown("strategy", type(strategy).__name__, STRATEGIES)
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
