"""Rounds of clients' turns: which worker plays whom, what each client sends, and when a round is over."""

import heapq
import math
from collections.abc import Callable, Sequence
from functools import cached_property, lru_cache
from itertools import islice
from typing import final

import numpy as np

from paceline.codec import TensorCodec
from paceline.errors import UsageError
from paceline.planner.coded import bytes_apart
from paceline.planner.demand import StepWork
from paceline.planner.fabric import Floats, Loads
from paceline.planner.setting import Setting
from paceline.roster import Participation, Roster
from paceline.seeding import derive
from paceline.strategies.federated.uploading import coding_s
from paceline.strategies.traits import ClientTurns

_SEED = 0
"""Plans price the clients that a run with this seed, the default, draws."""
NUM_ROUNDS = 16
"""Over which a prediction takes the mean."""


@lru_cache(maxsize=64)
def sizes_of(participation: Participation, num_samples: int) -> tuple[int, ...]:
    """How many samples each client has. Raises UsageError where they cannot be divided so, or only their values say
    how."""
    partition = participation.partition
    if partition.sizes_follow_values:
        raise UsageError(f"partition={partition} divides samples by their values, which no plan knows")
    parts = partition.divide(
        num_samples, participation.num_clients, column=lambda _: [0] * num_samples, seed=derive(_SEED, "partition")
    )
    return tuple(map(len, parts))


def why_unpriced(traffic: ClientTurns, work: StepWork) -> str | None:
    """Says why these turns have no price; none if they have one. See `question.why_unpriced`."""
    if not work.data_samples:
        return "has clients, and nothing says how many samples they share (data_samples of the work)"
    try:
        sizes_of(traffic.participation, work.data_samples)
    except UsageError as error:
        return f"has clients, and {error}"
    return None


def upload_bytes(traffic: ClientTurns, work: StepWork) -> float:
    """What a client sends of its turn. What travels beside its change is not coded."""
    coded = float(work.parameter_bytes) if traffic.codec is None else bytes_apart(traffic.codec, work)
    return coded + traffic.num_besides * work.parameter_bytes


@final
class Turns:
    """The rounds of one run. A batch that a client does not fill takes its part of a step."""

    def __init__(self, traffic: ClientTurns, setting: Setting) -> None:
        participation, work = traffic.participation, setting.work
        sizes = sizes_of(participation, work.data_samples)
        num_batches = [math.ceil(size / work.samples) for size in sizes]
        self._steps = [participation.epochs * size / work.samples for size in sizes]
        self._roster = Roster(
            participation, sizes=sizes, num_batches=num_batches, rank=0, ranks=range(setting.num_workers), seed=_SEED
        )
        self._traffic = traffic
        self._setting, self._num_bytes = setting, upload_bytes(traffic, work)

    def round(self, number: int) -> list[list[float]]:
        """The steps of each turn that each rank plays, in its order."""
        turns: list[list[float]] = [[] for _ in range(self._setting.num_workers)]
        for client, rank in self._roster.players(number).items():
            turns[rank].append(self._steps[client])
        return turns

    def ends_s(self, turns: Sequence[Sequence[float]], computing_s: Callable[[int, float], float]) -> Floats:
        """When the last change of each rank has come to the server, on the first rank's host, in seconds from the
        round's start. Changes from other hosts queue at its card as they come.

        Args:
            computing_s: of a rank, for so many steps.
        """
        ends_s, left = np.zeros(len(turns)), [iter(own) for own in turns]

        def begun(rank: int, from_s: float) -> list[tuple[float, int]]:
            """When the rank's next change leaves, if there is one."""
            return [(from_s + computing_s(rank, n) + self._coding_s[rank], rank) for n in islice(left[rank], 1)]

        leaving = [leaves for rank in range(len(turns)) for leaves in begun(rank, 0.0)]
        heapq.heapify(leaving)
        free_s, queues_s = 0.0, self._num_bytes / float(self._setting.fabric.rates.down[self._hosts[0]])
        while leaving:
            now_s, rank = heapq.heappop(leaving)
            alone_s, latency_s = self._alone_s[rank], self._latency_s[rank]
            ends_s[rank] = now_s + latency_s + alone_s
            if self._hosts[rank] != self._hosts[0]:
                free_s = max(free_s, now_s + latency_s) + queues_s
                ends_s[rank] = max(ends_s[rank], free_s)
            for leaves in begun(rank, float(ends_s[rank])):
                heapq.heappush(leaving, leaves)
        return ends_s

    def loads(self, turns: Sequence[Sequence[float]]) -> Loads:
        """What the uploads of a round put on the links."""
        sizes = np.array([len(own) * self._num_bytes for own in turns])
        return self._setting.fabric.messages(self._hosts, np.full_like(self._hosts, self._hosts[0]), sizes)

    @cached_property
    def _hosts(self) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        return np.array(self._setting.places.workers, dtype=np.int64)

    @cached_property
    def _coding_s(self) -> list[float]:
        """To encode a change and to decode it again, of each rank, whose core others may share."""
        codec, setting, work = self._traffic.codec, self._setting, self._setting.work
        if not isinstance(codec, TensorCodec):
            return [0.0] * setting.num_workers
        operation_s = setting.cluster.communication.coding_s
        each_s = coding_s(codec, work.parameter_bytes, num_tensors=len(work.tensor_bytes), operation_s=operation_s)
        own_s: list[float] = (each_s * setting.core_shares).tolist()
        return own_s

    @cached_property
    def _latency_s(self) -> list[float]:
        to = np.full_like(self._hosts, self._hosts[0])
        found: list[float] = self._setting.fabric.latency_s(self._hosts, to).tolist()
        return found

    @cached_property
    def _alone_s(self) -> list[float]:
        """What an upload of each rank takes where no other one is under way."""
        fabric, to = self._setting.fabric, self._hosts[:1]
        rate = {host: float(fabric.shares_per_s(np.array([host]), to)[0]) for host in set(self._hosts.tolist())}
        return [self._num_bytes / rate[host] for host in self._hosts.tolist()]
