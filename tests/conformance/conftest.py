"""The table of strategies, for the checks that run over it."""

from __future__ import annotations

import zlib
from typing import Any

import pytest

from tests.conformance.rows import ROWS, Row, When
from tests.covering import left_to

ALL_ROWS = ("tests.conformance.test_on_virtual", "tests.conformance.test_on_gpu", "tests.conformance.test_over_nccl")


A_CHECK = 4
"""Of the rows that stand for one another, each check has every so many-th one, and the next check perhaps others."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A check marked `every_row` runs over every row on the virtual engine, and in processes over some of them.

    What a check asks does not depend on a codec, but where a run goes on from what the codec owes; so one row stands
    for others that differ in it alone. Nor does what a script means to a strategy depend on the engine, but only the
    way of the bytes; so in processes those rows stand for one another that are left to `make test-slow`.
    """
    mark = metafunc.definition.get_closest_marker("every_row")
    if mark is None:
        return
    is_virtual = metafunc.module.__name__ in ALL_ROWS
    only_deterministic = mark.kwargs.get("is_deterministic", False)
    rows = [row for row in ROWS if row.is_deterministic or not only_deterministic]
    rows = [row for row in rows if mark.kwargs.get("of_codecs", True) or not row.is_another_codec]
    taken = [(row, when) for row in rows if (when := _when(row, is_virtual)) != "never"]
    if is_virtual:
        alike = [row.name for row, _ in taken if row.is_another_codec and not only_deterministic]
    else:
        alike = [row.name for row, when in taken if when == "slow"]
    chosen = alike[zlib.crc32(metafunc.function.__name__.encode()) % A_CHECK :: A_CHECK]
    left_out = set(alike) - set(chosen)
    metafunc.parametrize("row", [_case(row, when, is_chosen=row.name not in left_out) for row, when in taken])


def _when(row: Row, is_virtual: bool) -> When:
    return ("slow" if row.is_slow else "quick") if is_virtual else row.in_processes


def _case(row: Row, when: When, *, is_chosen: bool) -> Any:
    return pytest.param(row, id=row.name, marks=left_to(is_quick=when == "quick", is_chosen=is_chosen))
