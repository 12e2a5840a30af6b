"""Optimizers of rows, beside torch's and beside papers."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import UsageError
from paceline.server.tables.row_optimizers import FTRL, RowWiseAdagrad, of_text
from paceline.server.tables.table import Table
from tests.unit.one_table import BATCHES, DIM, NUM_ROWS, Net, gradients_of, spec_of

TWINS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd:lr=0.1": partial(torch.optim.SGD, lr=0.1),
    "adagrad:lr=0.1:initial=0.5": partial(torch.optim.Adagrad, lr=0.1, initial_accumulator_value=0.5),
    "adam:lr=0.05:beta1=0.8": partial(torch.optim.SparseAdam, lr=0.05, betas=(0.8, 0.999)),
}


@pytest.mark.parametrize("optimizer", TWINS)
@settings(max_examples=10, deadline=None)
@given(batches=BATCHES, num_servers=st.integers(1, 4))
def test_rows_are_updated_as_a_sparse_embedding(optimizer: str, batches: list[list[int]], num_servers: int) -> None:
    weight = Table(spec_of(optimizer)).read(torch.arange(NUM_ROWS)).requires_grad_()
    twin = TWINS[optimizer]([weight])
    net = Net(spec_of(optimizer), num_servers=num_servers)
    for number, keys in enumerate(batches):
        found = gradients_of(keys, number)
        weight.grad = torch.sparse_coo_tensor(
            found.keys[None], found.values, weight.shape, check_invariants=True
        ).coalesce()
        twin.step()
        net.update({0: (1.0, found)})
    torch.testing.assert_close(net.read(range(NUM_ROWS)), weight.detach())


@settings(max_examples=10, deadline=None)
@given(batches=BATCHES, l1=st.sampled_from([0.0, 0.4]))
def test_ftrl_follows_its_paper(batches: list[list[int]], l1: float) -> None:
    """McMahan et al. 2013, algorithm 1, one number after the other."""
    table = Table(spec_of(f"ftrl:lr=0.5:beta=2:l1={l1}:l2=0.1", std=0.0))
    z, n, w = ([[0.0] * DIM for _ in range(NUM_ROWS)] for _ in range(3))
    for number, keys in enumerate(batches):
        found = gradients_of(keys, number)
        table.update(found)
        for key, values in zip(found.keys.tolist(), found.values.tolist(), strict=True):
            for i, g in enumerate(values):
                sigma = (math.sqrt(n[key][i] + g * g) - math.sqrt(n[key][i])) / 0.5
                z[key][i] += g - sigma * w[key][i]
                n[key][i] += g * g
                strength = (2 + math.sqrt(n[key][i])) / 0.5 + 0.1
                sign = math.copysign(1.0, z[key][i])
                w[key][i] = 0.0 if abs(z[key][i]) <= l1 else -(z[key][i] - sign * l1) / strength
    torch.testing.assert_close(table.read(torch.arange(NUM_ROWS)), torch.tensor(w, dtype=torch.float64))


def test_row_wise_adagrad_keeps_one_number_a_row() -> None:
    table = Table(spec_of("row-wise-adagrad:lr=0.1", std=0.0))
    found = gradients_of([2, 7], 0)
    for _ in range(2):
        table.update(found)
    square = found.values.square().mean(dim=1, keepdim=True)
    expected = -0.1 * found.values * (1 / square.sqrt() + 1 / (2 * square).sqrt())
    torch.testing.assert_close(table.read(found.keys), expected)
    assert table.state()["sum"].shape == (2, 1)


@pytest.mark.parametrize("text", ["adagrad:lr=-1", "adam:beta1=1", "ftrl:lr=0", "sgd:lr=nan", "nothing"])
def test_settings_out_of_range_are_refused(text: str) -> None:
    with pytest.raises(UsageError):
        of_text(text)


def test_optimizers_are_the_same_from_their_text() -> None:
    for optimizer in (FTRL(lr=0.3, l1=1e-5), RowWiseAdagrad(lr=0.1 + 0.2, eps=1e-7)):
        assert of_text(str(optimizer)) == optimizer
