"""What of the process's state each virtual worker has for itself."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.random.mtrand import get_bit_generator

from paceline.engines.virtual.isolation import random_state
from paceline.engines.virtual.isolation.interpreter import kept
from paceline.engines.virtual.isolation.random_state import RandomState


def hold(gaussian: float | None) -> float:
    """Have numpy hold this, or nothing, as what it draws next; its numbers, and its place among them, stay."""
    state = np.random.get_state(legacy=False)
    np.random.set_state({**state, "has_gauss": int(gaussian is not None), "gauss": gaussian or 0.0})
    return 0.0


DRAWS: dict[str, Callable[[], float]] = {
    "gaussian": lambda: float(np.random.standard_normal()),  # numpy makes two at a time, and keeps one
    "uniform": lambda: float(np.random.random_sample()),
    "all of them": lambda: float(np.random.bytes(4 * 624)[0]),  # the place among the numbers is as before
    "a gaussian given back": lambda: hold(0.5),
    "another given back": lambda: hold(0.25),
    "a gaussian taken away": lambda: hold(None),
    "python": random.random,
    "python gaussian": lambda: random.gauss(0, 1),
    "torch": lambda: float(torch.randn(1)),
    "none": lambda: 0.0,
}


def seed(worker: int) -> None:
    torch.manual_seed(worker)
    np.random.seed(worker)
    random.seed(worker)


def alone(worker: int, draws: list[str]) -> list[float]:
    """What the worker draws where nobody else is."""
    seed(worker)
    return [DRAWS[name]() for name in draws]


@pytest.mark.parametrize("hidden", [None, "_numpy_memory", "_python_memory"])
@given(turns=st.lists(st.tuples(st.integers(0, 2), st.lists(st.sampled_from(list(DRAWS)), max_size=3)), max_size=12))
def test_each_worker_draws_as_if_alone(hidden: str | None, turns: list[tuple[int, list[str]]]) -> None:
    """Also with a numpy or a Python that keeps what it holds where it is not found."""
    assert random_state._numpy_memory(get_bit_generator()) is not None
    assert random_state._python_memory() is not None
    with pytest.MonkeyPatch.context() as patch:
        if hidden is not None:
            patch.setattr(random_state, hidden, lambda *_: None)
        check_turns(turns)


def check_turns(turns: list[tuple[int, list[str]]]) -> None:
    with kept():
        states = []
        for worker in range(3):
            seed(worker)
            states.append(RandomState())
        drawn: dict[int, list[float]] = {worker: [] for worker in range(3)}
        last = None
        for worker, draws in turns:
            if worker is not last:
                if last is not None:
                    states[last].save()
                states[worker].restore(states[last] if last is not None else None)
                last = worker
            drawn[worker] += [DRAWS[name]() for name in draws]
        for worker in range(3):
            names = [name for turn, draws in turns if turn == worker for name in draws]
            assert drawn[worker] == alone(worker, names)


@pytest.mark.parametrize("name", DRAWS)
def test_the_process_draws_on_as_before(name: str) -> None:
    expected = alone(7, [name, "gaussian", "uniform"])[1:]
    seed(7)
    DRAWS[name]()
    with kept():
        seed(8)
        DRAWS["gaussian"]()
    assert [DRAWS["gaussian"](), DRAWS["uniform"]()] == expected
