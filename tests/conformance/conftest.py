"""The table of strategies, for the checks that run over it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from operator import attrgetter
from typing import Any

import pytest

from tests.conformance.rows import ROWS, Row, When
from tests.covering import left_to

ALL_ROWS = ("tests.conformance.test_on_virtual", "tests.conformance.test_on_gpu", "tests.conformance.test_over_nccl")


A_CHECK = 4
"""Of the rows that stand for one another, each check has every so many-th one, and the next check perhaps others."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Which rows a check marked `every_row` runs over, on the virtual engine and in processes.

    Of rows that are promised the same, `make test` has one for each check, and another one for the next; in processes,
    of rows whose bytes go the same way. `make test-slow` has the rest. What a check asks does not depend on a codec,
    but where a run goes on from what the codec owes; so one row stands for others that differ in it alone, and in
    processes for others that are slow.
    """
    mark = metafunc.definition.get_closest_marker("every_row")
    if mark is None:
        return
    is_virtual = metafunc.module.__name__ in ALL_ROWS
    only_deterministic = mark.kwargs.get("is_deterministic", False)
    rows = [row for row in ROWS if row.is_deterministic or not only_deterministic]
    rows = [row for row in rows if mark.kwargs.get("of_codecs", True) or not row.is_another_codec]
    taken = [(row, when) for row in rows if (when := _when(row, is_virtual)) != "never"]
    number = [name for name, each in vars(metafunc.module).items() if _is_check(each)].index(metafunc.function.__name__)
    if is_virtual:
        alike = [row.name for row, _ in taken if row.is_another_codec and not only_deterministic]
    else:
        alike = [row.name for row, when in taken if when == "slow"]
    quick = [row for row, when in taken if when == "quick"]
    first = _one_of_a_kind(quick, attrgetter("kind" if is_virtual else "way"), number)
    left_out = set(alike) - set(alike[number % A_CHECK :: A_CHECK])
    cases = [
        pytest.param(row, id=row.name, marks=left_to(is_quick=row.name in first, is_chosen=row.name not in left_out))
        for row, _ in taken
    ]
    metafunc.parametrize("row", cases)


def _is_check(thing: object) -> bool:
    return any(mark.name == "every_row" for mark in getattr(thing, "pytestmark", ()))


def _one_of_a_kind(rows: Sequence[Row], kind_of: Callable[[Row], Any], number: int) -> set[str]:
    """Which rows the check of this number has first."""
    kinds = [[row.name for row in kind] for _, kind in groupby(sorted(rows, key=kind_of), kind_of)]
    return {kind[number % len(kind)] for kind in kinds}


def _when(row: Row, is_virtual: bool) -> When:
    return ("slow" if row.is_slow else "quick") if is_virtual else row.in_processes
