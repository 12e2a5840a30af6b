"""The table of strategies, for the checks that run over it."""

from __future__ import annotations

import zlib
from typing import Any

import pytest

from tests.conformance.rows import ROWS, Row, When

ALL_ROWS = ("tests.conformance.test_on_virtual", "tests.conformance.test_on_gpu", "tests.conformance.test_over_nccl")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A check marked `every_row` runs over every row on the virtual engine, and in processes over some of them.

    What a script means to a strategy is the same on both engines; only the way of the bytes is another. So of the rows
    that processes leave to `make test-slow` one check has every other one, and another check perhaps the rest.
    """
    mark = metafunc.definition.get_closest_marker("every_row")
    if mark is None:
        return
    is_virtual = metafunc.module.__name__ in ALL_ROWS
    rows = [row for row in ROWS if row.is_deterministic or not mark.kwargs.get("is_deterministic")]
    rows = [row for row in rows if mark.kwargs.get("of_codecs", True) or not row.is_another_codec]
    chosen = [(row, when) for row in rows if (when := _when(row, is_virtual)) != "never"]
    if not is_virtual:
        quick, slow = ([case for case in chosen if case[1] == when] for when in ("quick", "slow"))
        chosen = quick + slow[zlib.crc32(metafunc.function.__name__.encode()) % 2 :: 2]
    metafunc.parametrize("row", [_case(row, when) for row, when in chosen])


def _when(row: Row, is_virtual: bool) -> When:
    return ("slow" if row.is_slow else "quick") if is_virtual else row.in_processes


def _case(row: Row, when: When) -> Any:
    return pytest.param(row, id=row.name, marks=[pytest.mark.slow] if when == "slow" else [])
