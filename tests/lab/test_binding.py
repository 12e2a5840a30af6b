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
from paceline.lab.chance import Sample


def costs(workers: int, *, samples: float = 1000, std: float = math.nan, num: int = 1, **worker_s: float) -> Costs:
    """Each with the same standard deviation over as many seeds."""
    parts = {"compute": 0.0, "communication": 0.0, "waiting": 0.0, **worker_s}
    time_s = samples * sum(parts.values()) / workers
    known = {part: Sample(value, std, num) for part, value in parts.items()}
    return Costs(workers, 0, time_s, Sample(samples, std, num), known)


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
    assert str(binding.what_binds(costs(1, compute=1.0), more)) == said


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
    found = binding.what_binds(before, after)
    factors = {name: sum(more) / (sum(more) - (b - a)) for name, a, b in zip(names, fewer, more, strict=True)}
    factors["samples"] = samples[1] / samples[0]
    if found.what == binding.NOTHING:
        assert max(factors.values()) <= 1.05
    else:
        assert found.factor == pytest.approx(max(factors.values()))
        assert found.factor == pytest.approx(factors[found.what])


def with_servers(workers: int, *, moved_per_s: float, servers: int = 1, **worker_s: Any) -> Costs:
    return replace(costs(workers, **worker_s), servers=servers, moved_per_s=Sample(moved_per_s, math.nan, 1))


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
    assert str(binding.what_binds(ALONE, more)).startswith(said)


def test_the_servers_are_not_blamed_where_noise_hides_whether_all_compute_longer() -> None:
    """Compute grew by 0.3 s, and the margin is 0.45 s; communication by 1.2 s, which no chance explains."""
    few, many = (
        with_servers(n, moved_per_s=200e6, compute=compute, communication=communication, std=0.2, num=3)
        for n, compute, communication in ((10, 1.0, 0.2), (20, 1.3, 1.4))
    )
    assert str(binding.what_binds(few, many)).startswith("communication with the servers binds")


def test_growth_within_the_spread_binds_nothing() -> None:
    few, many = (costs(n, compute=c, std=0.2, num=3) for n, c in ((4, 1.0), (5, 1.3)))
    # 2.776 x 0.2 x sqrt(2 / 3) = 0.45 s, and compute grew by 0.3 s. Time fell from 250 s to 260 s, which is no fall.
    found = binding.what_binds(few, many)
    assert found.what == binding.NOTHING
    assert str(found) == "no single cost stands out"
