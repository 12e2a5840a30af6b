"""What workers exchange with their neighbours: over which links, how long it takes, and for whom they wait."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import final

import numpy as np

from paceline.codec.costs import Speed, message_coding_s
from paceline.errors import UsageError
from paceline.planner.coded import payload_bytes
from paceline.planner.fabric import Floats, Loads, Numbers
from paceline.planner.setting import Setting
from paceline.planner.stragglers import Group
from paceline.strategies.traits import Neighbouring
from paceline.topology import Topology

_NUM_SAMPLES = 16  # workers whose neighbourhoods are looked at


@final
@dataclass(frozen=True)
class Round:
    """The messages of one exchange: each worker sends its neighbours something as large as the gradients."""

    senders: Numbers
    receivers: Numbers
    posting_s: Floats
    """How long the sender of each is at posting all of its own, until the last has been taken in."""
    core_s: Floats
    """Seconds of a shared core that each worker needs to send and to take its messages."""
    turns_s: float
    """How long the core that has most of them is at it."""
    way_s: Floats
    """From when the sender has posted it until the receiver has it, while all others are under way."""
    loads: Loads

    @property
    def posted_s(self) -> float:
        """From when all have computed until the last has posted its own, which hides behind nothing."""
        return max(self.turns_s, float(self.posting_s.max(initial=0.0)))

    @property
    def slowest_s(self) -> float:
        """From when all have computed until each has heard from its neighbours."""
        sent_s = np.maximum(self.posting_s, self.turns_s) + self.way_s
        return float(sent_s.max(initial=0.0))


def rounds_of(traffic: Neighbouring, setting: Setting) -> list[Round]:
    """One for each step of the topology's period. Raises UsageError if the topology is not one of so many workers."""
    size, topology = setting.num_workers, traffic.topology
    try:
        return [_round(traffic, step, setting) for step in range(topology.period(size))]
    except ValueError as error:
        raise UsageError(f"{type(topology).__name__} is no topology of {size} workers: {error}") from None


def _round(traffic: Neighbouring, step: int, setting: Setting) -> Round:
    size, fabric, num_bytes = setting.num_workers, setting.fabric, traffic.message_size * setting.work.parameter_bytes
    if is_coded(traffic, setting) and traffic.codec is not None:
        num_bytes = payload_bytes(traffic.codec, setting.work)
    pairs = [
        (source, rank)
        for rank in range(size)
        for source in traffic.topology.sources(step, rank, size)
        if source != rank
    ]
    senders, receivers = np.array(pairs, dtype=np.int64).reshape(-1, 2).T
    hosts = np.array(setting.places.workers)
    here, there = hosts[senders], hosts[receivers]
    bursts = np.array([setting.costs.burst(count) for count in np.bincount(senders, minlength=size).tolist()])
    posted_s: Floats = bursts[:, 0] + setting.costs.taken_core_s
    own_core_s: Floats = bursts[:, 1]
    np.add.at(own_core_s, receivers, np.where(here != there, setting.costs.taken_core_s, 0.0))
    return Round(
        senders,
        receivers,
        posting_s=posted_s[senders],
        core_s=own_core_s,
        turns_s=float(np.bincount(setting.cores, own_core_s).max()),
        way_s=num_bytes / fabric.shares_per_s(here, there) + fabric.latency_s(here, there),
        loads=fabric.messages(here, there, num_bytes),
    )


def is_coded(traffic: Neighbouring, setting: Setting) -> bool:
    is_one_host = len(set(setting.places.workers)) == 1
    return traffic.codec is not None and not (traffic.codec_scope == "links" and is_one_host)


def coding_s(traffic: Neighbouring, setting: Setting) -> float:
    """What a worker codes in an exchange: its own message, to and fro, and its neighbours'."""
    if traffic.codec is None or not is_coded(traffic, setting):
        return 0.0
    size, num_bytes = setting.num_workers, setting.work.parameter_bytes
    speed = Speed.said(traffic.codec, operation_s=setting.cluster.communication.coding_s)
    encode_s, decode_s = message_coding_s(traffic.codec, speed, num_bytes, num_tensors=len(setting.work.tensor_bytes))
    most = max(len(traffic.topology.neighbours(0, rank, size).receives_from) for rank in range(size))
    slowest = min(setting.cluster.each_host()[host].speed for host in set(setting.places.workers))
    return setting.queued_s((encode_s + (1 + most) * decode_s) / slowest)


def waited_for(topology: Topology, groups: Sequence[Group], *, hops: int) -> list[Group]:
    """The workers that one has to wait for: as many as are so many hops away or nearer, the slowest of all.

    Two hops give what a run takes in the long run to some percent, on rings and denser graphs, for log-normal and
    exponential times: a neighbour's neighbour is felt a step later, and one that is farther away hardly ever. Who is
    always slow is in the end waited for by everybody.
    """
    size = sum(group.count for group in groups)
    step = max(1, size // _NUM_SAMPLES)
    num_near = [len(_near(topology, rank, size, hops=hops)) for rank in range(0, size, step)]
    left = round(statistics.fmean(num_near))
    found = []
    for group in sorted(groups, key=lambda group: -group.times.expected_s):
        if left > 0:
            found.append(replace(group, count=min(left, group.count)))
            left -= group.count
    return found


def _near(topology: Topology, rank: int, size: int, *, hops: int) -> set[int]:
    """The worker itself, and those whose message reaches it within so many steps."""
    near, period = {rank}, topology.period(size)
    for step in range(hops):
        if len(near) < size:
            near |= {source for other in near for source in topology.sources(step % period, other, size)}
    return near
