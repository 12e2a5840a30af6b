"""Rows in 16 bits an element, with updates in float32."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.nn import ShardedEmbedding
from paceline.server.tables.kept_rows import KeptRows
from paceline.server.tables.rounding import rounded
from paceline.server.tables.spec import RowGradients
from paceline.server.tables.table import Table
from tests.unit.one_table import BATCHES, NUM_ROWS, Net, gradients_of, spec_of

HALF = [torch.bfloat16, torch.float16]
NUMBERS = st.floats(2.0**-14, 1000.0, width=32) | st.floats(-1000.0, -(2.0**-14), width=32) | st.just(0.0)


@pytest.mark.parametrize("dtype", HALF)
@given(values=st.lists(NUMBERS, min_size=1, max_size=9), key=st.integers(0, 2**63 - 1), number=st.integers(1, 10**6))
def test_an_element_becomes_one_of_its_neighbours(
    dtype: torch.dtype, values: list[float], key: int, number: int
) -> None:
    rows, keys = torch.tensor([values]), torch.tensor([key])
    found = rounded(rows, dtype, keys, seed=3, number=number)
    gap = (rows.abs() * torch.finfo(dtype).eps).clamp(min=torch.finfo(dtype).tiny)
    assert ((found.float() - rows).abs() <= gap).all()
    assert torch.equal(rounded(found.float(), dtype, keys, seed=3, number=number + 1), found)
    assert torch.equal(rounded(rows, dtype, keys, seed=3, number=number), found)


@pytest.mark.parametrize("dtype", HALF)
def test_small_updates_are_not_lost(dtype: torch.dtype) -> None:
    """A hundred of a hundredth of a last bit each, of which the nearest number knows nothing; their mean over 4,000
    elements is within four standard errors."""
    bit, num = torch.finfo(dtype).eps, 1000
    table = Table(spec_of("sgd:lr=1", num_rows=num, dim=4, std=0.0, dtype=dtype))
    keys = torch.arange(num)
    table.update(RowGradients(keys, torch.full((num, 4), -1.0)))
    for _ in range(100):
        table.update(RowGradients(keys, torch.full((num, 4), -bit / 100)))
    change = (table.read(keys).float() - 1.0) / bit
    assert float(change.mean()) == pytest.approx(1.0, abs=4 / math.sqrt(4 * num))
    assert float(change.var()) == pytest.approx(1.0, rel=0.2)  # of a hundred draws of 1 with a chance of a hundredth


@settings(max_examples=8, deadline=None)
@given(batches=BATCHES, servers=st.integers(1, 3), moves_at=st.integers(0, 5), dtype=st.sampled_from(HALF))
def test_rows_are_the_same_on_any_number_of_servers(
    batches: list[list[int]], servers: int, moves_at: int, dtype: torch.dtype
) -> None:
    spec = spec_of("adagrad:lr=0.1", dtype=dtype)
    one, net = Net(spec, num_servers=1), Net(spec, num_servers=servers)
    for number, keys in enumerate(batches):
        if number == moves_at:
            state = net.state()
            net = Net(spec, num_servers=4 - servers)
            net.load(state)
        found = gradients_of(keys, number)
        for each in (one, net):
            each.update({0: (1.0, RowGradients(found.keys, found.values.float()))})
    assert torch.equal(one.read(range(NUM_ROWS)), net.read(range(NUM_ROWS)))
    state = net.state()
    assert (state["rows"].dtype, state["sum"].dtype) == (dtype, torch.float32)


def test_a_worker_updates_its_copies() -> None:
    kept = KeptRows(spec_of("sgd:lr=1", dtype=torch.bfloat16))
    keys = torch.arange(3)
    kept.keep(keys, torch.zeros(3, 3, dtype=torch.bfloat16), torch.full((3,), 9), clock=0)
    kept.update(RowGradients(keys[:2], -torch.ones(2, 3)))
    rows = kept.find(keys, clock=1).rows
    assert rows.dtype is torch.bfloat16
    assert rows[:, 0].tolist() == [1.0, 1.0, 0.0]


@pytest.mark.parametrize("dtype", HALF)
def test_the_script_has_float32(dtype: torch.dtype) -> None:
    table, twin = (ShardedEmbedding(9, 3, optimizer="sgd:lr=0.5", dtype=each) for each in (dtype, torch.float32))
    twin.load_rows({**twin.rows(), "seed": table.rows()["seed"]})
    for layer in (table, twin):
        rows = layer(torch.tensor([[1, 2], [2, 3]]))
        assert rows.dtype is torch.float32
        rows.square().sum().backward()
        layer.update()
    every = torch.arange(9)
    torch.testing.assert_close(table(every), twin(every), rtol=2 * torch.finfo(dtype).eps, atol=1e-3)
