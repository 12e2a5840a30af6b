"""Which cases stand for a product, of which a test costs a third of a second or more.

What a script does with its data, model and losses does not depend on how a strategy exchanges, and strategies of one
family treat it alike: so it runs under one of each family, by turns, and wherever it is told something else. The
others have the mark `product`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import pytest

Script, Strategy = TypeVar("Script"), TypeVar("Strategy")


def covering(
    scripts: Iterable[Script],
    families: Sequence[Sequence[Strategy]],
    outcome: Callable[[Strategy, Script], Hashable] = lambda strategy, script: None,
) -> Iterator[tuple[Strategy, Script, bool]]:
    """Each strategy with each script, and whether the case is chosen.

    Script number n is chosen under strategy n of each family, whose strategies begin anew when they are through, and
    under each further one whose `outcome` no strategy of the family before it has.
    """
    for number, script in enumerate(scripts):
        for family in families:
            first = number % len(family)
            seen: set[Hashable] = set()
            for strategy in (*family[first:], *family[:first]):
                told = outcome(strategy, script)
                yield strategy, script, strategy == family[first] or told not in seen
                seen.add(told)


def left_to(*, is_quick: bool, is_chosen: bool = True) -> list[pytest.MarkDecorator]:
    """The marks that leave a case to `make test-slow`, or to `make test-products` alone."""
    if is_quick:
        return []
    return [pytest.mark.slow] if is_chosen else [pytest.mark.slow, pytest.mark.product]


def stood_for(*values: Any) -> Any:
    """A case of slow tests that others stand for."""
    return pytest.param(*values, marks=left_to(is_quick=False, is_chosen=False))


def in_turns(scripts: Iterable[Any], strategies: Sequence[Any], *, are_quick: bool = False) -> list[Any]:
    """Cases that are slow, or quick: each script, or whatever else is a place for faults, with one strategy, and the
    next one with the next."""
    return [
        pytest.param(strategy, script, marks=left_to(is_quick=are_quick and is_chosen, is_chosen=is_chosen))
        for strategy, script, is_chosen in covering(scripts, [strategies])
    ]
