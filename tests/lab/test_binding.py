"""What binds a study beyond a number of workers, from costs made by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.lab import binding
from paceline.lab.binding import Costs


def costs(workers: int, *, samples: float = 1000, off: tuple[float, ...] = (0.0, 0.0), **worker_s: float) -> Costs:
    """As many seeds as there are numbers in `off`, by which part of the mean each seed's parts are more."""
    parts = {"compute": 0.0, "communication": 0.0, "waiting": 0.0, **worker_s}
    time_s = samples * sum(parts.values()) / workers
    known = {part: {seed: value * (1 + more) for seed, more in enumerate(off)} for part, value in parts.items()}
    of_samples = {} if math.isnan(samples) else {seed: samples for seed, _ in enumerate(off)}
    return Costs(workers, 0, time_s, of_samples, known)


def what_binds(fewer: Costs, more: Costs) -> binding.Binding:
    return binding.what_binds(fewer, more, binding.noise_of([(fewer, more)]))


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (costs(4, compute=1.0), "nothing binds: the time falls in proportion"),
        (costs(4, compute=1.0, samples=1040), "nothing binds: the time falls in proportion"),
        (
            costs(4, compute=0.4),
            "the time falls by more than workers can share out: look for what else held up 1 worker, such as other "
            "work on the machine",
        ),
        (costs(4, compute=2.0), "computing binds: a sample takes 2.0 times the compute time that it takes on 1 worker"),
        (
            costs(4, compute=1.0, communication=1.0),
            "communication among workers binds, with 50 % of the workers' time, 0 % on 1 worker",
        ),
        (
            costs(4, compute=1.0, waiting=3.0, communication=1.0, samples=1500),
            "waiting for other workers binds, with 60 % of the workers' time, 0 % on 1 worker",
        ),
        (
            costs(4, compute=1.0, waiting=0.5, samples=3000),
            "statistical efficiency binds: it takes 3.0 times the samples of 1 worker",
        ),
        (
            costs(4, compute=1.4, communication=0.35, waiting=0.35, samples=1700),
            "statistical efficiency binds: it takes 1.7 times the samples of 1 worker",
        ),
        (costs(4, compute=2.0, samples=math.nan), "computing binds: a sample takes 2.0 times the compute time that "
         "it takes on 1 worker"),
    ],
)  # fmt: skip
def test_what_binds(more: Costs, said: str) -> None:
    assert str(what_binds(costs(1, compute=1.0), more)) == said


@given(
    fewer=st.tuples(*[st.floats(0.01, 100)] * 3),
    more=st.tuples(*[st.floats(0.01, 100)] * 3),
    samples=st.tuples(st.floats(1, 1e6), st.floats(1, 1e6)),
)
def test_what_binds_is_what_grew_most(
    fewer: tuple[float, ...], more: tuple[float, ...], samples: tuple[float, float]
) -> None:
    names = ("compute", "communication", "waiting")
    before = costs(1, samples=samples[0], **dict(zip(names, fewer, strict=True)))
    after = costs(2, samples=samples[1], **dict(zip(names, more, strict=True)))
    found = what_binds(before, after)
    factors = {name: sum(more) / (sum(more) - (b - a)) for name, a, b in zip(names, fewer, more, strict=True)}
    factors["samples"] = samples[1] / samples[0]
    if found.what == binding.NOTHING:
        assert max(factors.values()) <= 1.05
    else:
        assert found.factor == pytest.approx(max(factors.values()))
        assert found.factor == pytest.approx(factors[found.what])


def with_servers(workers: int, *, moved_per_s: float, servers: int = 1, **worker_s: Any) -> Costs:
    return replace(costs(workers, **worker_s), servers=servers, moved_per_s=moved_per_s)


ALONE = with_servers(10, moved_per_s=200e6, compute=1.0, communication=0.2)
FULL = "the servers or their links bind: 205 MB/s cross them, 200 on 10 workers, and communication takes 58 % of the"
PLAIN = "communication with the servers binds, with 58 % of the workers' time"


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (with_servers(20, moved_per_s=205e6, compute=1.0, communication=1.4), FULL),
        (with_servers(20, moved_per_s=300e6, compute=1.0, communication=1.4), PLAIN),  # they gave more when asked
        (with_servers(20, moved_per_s=205e6, compute=1.1, communication=1.52), PLAIN),  # one machine's cores are full
        (with_servers(20, moved_per_s=205e6, compute=1.0, communication=1.4, servers=2), PLAIN),  # others than before
        (with_servers(20, moved_per_s=0.0, compute=1.0, communication=1.4), PLAIN),  # nothing is known of bytes
        (
            with_servers(20, moved_per_s=205e6, compute=1.0, communication=0.2, waiting=1.2),
            "waiting for other workers binds",
        ),
    ],
)
def test_the_servers_bind_where_more_workers_get_no_more_out_of_them(more: Costs, said: str) -> None:
    assert str(what_binds(ALONE, more)).startswith(said)


def test_growth_within_the_spread_binds_nothing() -> None:
    """Compute grew by 0.3 s on average: by -0.16, 0.3 and 0.76 s with the three seeds."""
    few, many = costs(4, compute=1.0, off=(0.2, 0.0, -0.2)), costs(5, compute=1.3, off=(-0.2, 0.0, 0.2))
    found = what_binds(few, many)
    assert found.what == binding.NOTHING
    assert str(found) == "no single cost stands out"


def test_growth_that_all_seeds_share_binds_whatever_they_differ_by() -> None:
    """By 30 % with each seed, though seeds are 40 % apart."""
    few, many = costs(4, compute=1.0, off=(0.2, 0.0, -0.2)), costs(5, compute=1.3, off=(0.2, 0.0, -0.2))
    assert what_binds(few, many).what == binding.COMPUTE


def test_other_pairs_tell_what_chance_explains() -> None:
    """Two seeds, which grew by 17 and 43 %, tell little by themselves: t at 1 degree of freedom is above 12."""
    few, many = costs(4, compute=1.0), costs(5, compute=1.3, off=(-0.1, 0.1))
    others = [(costs(n, compute=1.0), costs(n + 1, compute=1.0, off=(-0.05, 0.05))) for n in range(1, 7)]
    assert what_binds(few, many).what == binding.NOTHING
    noise = binding.noise_of([(few, many), *others])
    assert binding.what_binds(few, many, noise).what == binding.COMPUTE


def test_one_seed_names_no_cause() -> None:
    assert what_binds(costs(1, compute=1.0, off=(0.0,)), costs(4, compute=9.0, off=(0.0,))).what == binding.NOTHING
