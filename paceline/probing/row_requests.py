"""How long requests about rows of a table take, each of which comes after a pause."""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import final

import torch

from paceline.comm.base import TableStore
from paceline.probing.timing import CacheEmptier, trimmed_mean
from paceline.server.tables.row_optimizers import Adagrad
from paceline.server.tables.spec import RowGradients, TableSpec

NUM_ROUNDS = 50
_NUM_WARMUP = 5
_ROUND_S, _PAUSE_S = 0.06, 0.005
"""A round begins so long after the one before, and no sooner than the pause after caches have been emptied."""
_NUM_ROWS, _WIDTH, _NUM_KEYS = 2**14, 64, 32  # keys of a request, whose bytes take next to no time

SPEC = TableSpec("rows", _NUM_ROWS, _WIDTH, Adagrad(lr=0.1))


@dataclass(frozen=True)
class RoundTimes:
    round_s: float
    """Seconds of a round, without the extremes: a request for rows, one with gradients of them, and an exchange."""
    variation: float
    """Of one request about rows: standard deviation over mean, of the log-normal distribution with its spread."""


@final
class RowRounds:
    """What a worker does in a step whose batch has rows, time and again.

    Two ranks begin their rounds at the same times, so that each answers the other as a server while its own worker
    waits. Before a round the caches are filled with other things, and the cores sleep, as they do when a step's
    computing has taken the place of what exchanges need.
    """

    def __init__(self, tables: TableStore, exchange: Callable[[], object], emptier: CacheEmptier) -> None:
        self._tables, self._exchange, self._emptier = tables, exchange, emptier
        self._keys = torch.arange(0, _NUM_ROWS, _NUM_ROWS // _NUM_KEYS)
        self._gradients = RowGradients(self._keys, SPEC.empty_rows(_NUM_KEYS).fill_(1.0))

    def warm_up(self) -> None:
        """The first rounds make the rows."""
        for _ in range(_NUM_WARMUP):
            self._round()

    def times(self) -> RoundTimes:
        begin_s, rounds = time.perf_counter(), []
        for _ in range(NUM_ROUNDS):
            begin_s += _ROUND_S
            self._emptier()
            time.sleep(max(_PAUSE_S, begin_s - time.perf_counter()))
            rounds.append(self._round())
        reads, pushes, _ = zip(*rounds, strict=True)
        return RoundTimes(trimmed_mean([sum(each) for each in rounds]), variation_of([reads, pushes]))

    def _round(self) -> tuple[float, float, float]:
        """Seconds of each of the three."""
        began_s = time.perf_counter()
        self._tables.read({0: self._keys}, is_fresh=False)
        read_s = time.perf_counter()
        self._tables.push([self._gradients], weight=1.0)
        pushed_s = time.perf_counter()
        self._exchange()
        return read_s - began_s, pushed_s - read_s, time.perf_counter() - pushed_s


def variation_of(kinds: Sequence[Sequence[float]]) -> float:
    """Standard deviation over mean, of the log-normal distribution whose logarithms differ as those of these times do
    within their kinds. One time that is far from all others so counts for little."""
    variance = statistics.fmean(statistics.pvariance([math.log(time_s) for time_s in times_s]) for times_s in kinds)
    return math.sqrt(math.expm1(variance))
