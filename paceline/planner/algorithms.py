"""All-reduce algorithms on a cluster: how long they take, and what they put on every link."""

import math

import numpy as np

from paceline.comm.algorithms.pieces import PIECE_BYTES
from paceline.planner import costs
from paceline.planner.fabric import Loads
from paceline.planner.setting import Setting


def parts_s(algorithm: str, setting: Setting, num_bytes: float) -> tuple[float, float]:
    """For how long an all-reduce keeps the next one waiting, and how much longer it takes, all ranks beginning at
    once. `auto` is the library's own; those over send and receive run one after the other."""
    if algorithm == "auto":
        return setting.ring.parts_s(num_bytes)
    return time_s(algorithm, setting, num_bytes), 0.0


def operation_s(algorithm: str, setting: Setting) -> float:
    """For which a worker is at starting an all-reduce, besides its messages."""
    return setting.operation_s if algorithm == "auto" else 0.0


def time_s(algorithm: str, setting: Setting, num_bytes: float) -> float:
    """An all-reduce over send and receive, all ranks beginning at once: the closed form, with the rate that its
    messages get on this cluster where they pass all at once."""
    fabric, ranks = setting.fabric, np.array(setting.places.workers)
    size = len(ranks)
    if size == 1:
        return 0.0
    pieces = {"piece_bytes": float(PIECE_BYTES), **setting.posting}
    if algorithm == "ring":
        return sum(setting.ring_of_ranks.parts_s(num_bytes))
    if algorithm == "naive-ring":  # half as many rounds, with n times the bytes
        return sum(setting.ring_of_ranks.parts_s(size * num_bytes)) / 2
    if algorithm == "halving-doubling":
        stages, (rate, latency_s) = setting.timed_halving(num_bytes), _rate_of_halving(setting, num_bytes)
        alone_s = costs.halving_doubling_s(size, num_bytes, bytes_per_s=rate, latency_s=latency_s)
        ends = ((ranks[here], ranks[there], float(sent_s.max())) for here, there, sent_s in stages)
        return alone_s + sum(setting.message_wait_s(*each) for each in ends)
    if algorithm == "reduce-broadcast":
        root = np.full(size - 1, ranks[0])
        rate = (size - 1) * float(fabric.shares_per_s(ranks[1:], root).min())
        latency_s = float(fabric.latency_s(ranks[1:], root).max())
        return costs.reduce_broadcast_s(size, num_bytes, bytes_per_s=rate, latency_s=latency_s, **pieces)
    if algorithm == "all-to-all":
        latency_s = float(fabric.farthest_s(ranks, ranks).max())
        one_way_s = fabric.busiest(_among_all(setting, num_bytes / size)).busy_s
        rate = (size - 1) * num_bytes / (size * one_way_s)
        alone_s = costs.all_to_all_s(size, num_bytes, bytes_per_s=rate, latency_s=latency_s, **pieces)
        num_messages = (size - 1) * math.ceil(num_bytes / size / PIECE_BYTES)
        return max(alone_s, 2 * setting.burst_turn_s(ranks, num_messages))
    parents, children = (ranks[ends] for ends in setting.trees.edges)
    one_way_s = fabric.busiest(fabric.messages(children, parents, num_bytes / 2)).busy_s
    return setting.trees.time_s(num_bytes, one_way_s=one_way_s, **setting.posting)


def loads(algorithm: str, setting: Setting, num_bytes: float) -> Loads:
    """What it puts on every link."""
    fabric, ranks = setting.fabric, np.array(setting.places.workers)
    size = len(ranks)
    if algorithm == "auto":
        return setting.ring.loads(num_bytes)
    if algorithm == "ring":
        return setting.ring_of_ranks.loads(num_bytes)
    if algorithm == "naive-ring":
        return setting.ring_of_ranks.loads(size * num_bytes) * 0.5
    if algorithm == "all-to-all":
        return _among_all(setting, num_bytes / size) * 2
    if algorithm == "reduce-broadcast":
        root = np.full(size - 1, ranks[0])
        return fabric.messages(ranks[1:], root, num_bytes) + fabric.messages(root, ranks[1:], num_bytes)
    if algorithm == "tree":
        parents, children = (ranks[ends] for ends in setting.trees.edges)
        return fabric.messages(children, parents, num_bytes / 2) + fabric.messages(parents, children, num_bytes / 2)
    total = fabric.nothing
    for sources, destinations, size_bytes in setting.halving_stages(num_bytes):
        total = total + fabric.messages(sources, destinations, size_bytes)
    return total


def _among_all(setting: Setting, num_bytes: float) -> Loads:
    """What the links carry when every rank sends one message to every other."""
    ranks = np.array(setting.places.workers)
    to_itself = setting.fabric.messages(ranks, ranks, -num_bytes)
    return setting.fabric.everyone_to_everyone(ranks, ranks, num_bytes) + to_itself


def _rate_of_halving(setting: Setting, num_bytes: float) -> tuple[float, float]:
    """Bytes per second and latency with which the closed form gives the sum over its stages."""
    stages = setting.halving_stages(num_bytes)
    fabric = setting.fabric
    times_s = [size_bytes / float(fabric.shares_per_s(here, there).min()) for here, there, size_bytes in stages]
    latencies_s = [float(fabric.latency_s(here, there).max()) for here, there, _ in stages]
    ideal = costs.halving_doubling_s(setting.num_workers, num_bytes, bytes_per_s=1.0)
    return ideal / sum(times_s), sum(latencies_s) / len(latencies_s) + setting.message_s


def all_gather(setting: Setting, num_bytes: float) -> tuple[float, Loads]:
    """Everyone gets such a tensor of every rank, all ranks beginning at once: how long it takes, and what it puts on
    every link. In each round a rank passes on what it has, at most twice as much as in the last one (Bruck et al.,
    "Efficient algorithms for all-to-all communications in multiport message-passing systems", IEEE TPDS 8(11), 1997,
    section 4)."""
    fabric, ranks = setting.fabric, np.array(setting.places.workers)
    time_s, total, distance, least_s = setting.operation_s, fabric.nothing, 1, setting.hop_s(ranks)
    while distance < len(ranks):
        there, sent_bytes = np.roll(ranks, distance), min(distance, len(ranks) - distance) * num_bytes
        hops_s = sent_bytes / fabric.shares_per_s(ranks, there) + fabric.latency_s(ranks, there)
        time_s, total = time_s + max(float(hops_s.max()), least_s), total + fabric.messages(ranks, there, sent_bytes)
        distance *= 2
    return time_s, total
