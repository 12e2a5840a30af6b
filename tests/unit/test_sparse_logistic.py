"""The recipe of sparse logistic regression reaches the optimum of a plain proximal gradient."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.unit.test_kv_sockets import served

RECIPE = Path(__file__).parents[2] / "recipes" / "sparse_logistic"
NUM_SAMPLES, NUM_FEATURES, L1 = 400, 60, 0.01


@pytest.fixture
def recipe(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(RECIPE))
    names = [path.stem for path in RECIPE.glob("*.py")]  # other recipes have a train.py, too
    for name in names:
        sys.modules.pop(name, None)
    yield importlib.import_module("train")
    for name in names:
        sys.modules.pop(name, None)


def optimum(samples: Any) -> tuple[float, np.ndarray[Any, Any]]:
    """Of a dense matrix, by steps of one size."""
    matrix = np.zeros((NUM_SAMPLES, NUM_FEATURES))
    np.add.at(matrix, (np.arange(NUM_SAMPLES)[:, None], samples.features.numpy()), samples.values.numpy())
    labels, weights = samples.labels.numpy(), np.zeros(NUM_FEATURES)
    size = 4 * NUM_SAMPLES / np.linalg.norm(matrix, 2) ** 2
    for _ in range(3000):
        slopes = -labels / (1 + np.exp(labels * (matrix @ weights)))
        moved = weights - size * (matrix.T @ slopes) / NUM_SAMPLES
        weights = np.sign(moved) * np.maximum(np.abs(moved) - size * L1, 0)
    loss = np.log1p(np.exp(-labels * (matrix @ weights))).mean()
    return float(loss + L1 * np.abs(weights).sum()), weights


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("staleness", "lr", "filters"),
    [
        (0, 4.0, ["changed", "kkt"]),
        pytest.param(0, 4.0, [], marks=SLOW),
        pytest.param(2, 2.0, [], marks=SLOW),
        pytest.param(2, 2.0, ["kkt"], marks=SLOW),
    ],
)
def test_it_reaches_the_optimum(recipe: Any, staleness: int, lr: float, filters: list[str]) -> None:
    args = argparse.Namespace(
        workers=2, servers=2, samples=NUM_SAMPLES, features=NUM_FEATURES, l1=L1, lr=lr, iterations=200,
        staleness=staleness, filter=filters,
    )  # fmt: skip
    everything = recipe.planted(NUM_SAMPLES, num_features=NUM_FEATURES)
    wanted, weights = optimum(everything)
    assert 10 < np.count_nonzero(weights) < NUM_FEATURES - 5
    spec = recipe.store_of(args)
    with served(**vars(spec)) as group, ThreadPoolExecutor() as pool:
        for found in pool.map(lambda rank: recipe.work(rank, group, args), range(2)):
            assert recipe.objective(everything, found, L1) == pytest.approx(wanted, rel=1e-5)
            assert np.abs(found.numpy() - weights).max() < 0.02
