"""How unevenly connections share a link: those between two hosts, and those from several hosts to one."""

import math
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import zmq

from paceline.comm.wire import AGAIN_S, Caller, Keys
from paceline.messages import Kind, Message, WireError
from paceline.probing.echo import EPOCH

NUM_CONNECTIONS = 8
"""As many as a host of five has with a server on each."""
_PIECE_BYTES = 2**16
_NUM_UNDER_WAY = 64  # of a connection: more than its window, which is what is to decide
_STREAM_S = 1.0
_ANSWER_S = 30.0
NUM_TRIES = 3
_LEAST_SHARE = 0.02  # of an even share: one that gets less could get nothing, which has no logarithm
_LEAST_PIECES = 10  # a connection, for shares to be more than chance: about 40 Mbit/s


def measure_unevenness(keys: Keys, endpoint: str, *, name: str) -> float | None:
    """As `unevenness_of`, of what connections get that begin to push to a host at the same time. `name` is the caller's
    own."""
    tries = []
    for attempt in range(NUM_TRIES):
        with connected(keys, endpoint, [f"{name}-{attempt}-{number}" for number in range(NUM_CONNECTIONS)]) as callers:
            tries.append(answered(callers))
    return unevenness_of(tries)


def unevenness_of(tries: Sequence[Sequence[int]]) -> float | None:
    """The standard deviation of the logarithm of what each connection got, of several tries; none where too little
    passed."""
    if any(sum(counts) < _LEAST_PIECES * len(counts) for counts in tries):
        return None
    return statistics.pstdev(share for counts in tries for share in logarithms_of_shares(counts))


def logarithms_of_shares(counts: Sequence[int]) -> list[float]:
    """The logarithm of each count over an even share of them all."""
    even = sum(counts) / len(counts)
    return [math.log(max(count / even, _LEAST_SHARE)) for count in counts]


@contextmanager
def connected(keys: Keys, endpoint: str, names: Sequence[str]) -> Iterator[list[Caller]]:
    """Callers of these names that have all shaken hands, so that none is late when the first piece leaves. Raises
    WireError if the other host does not answer."""
    callers = [Caller(keys, endpoint=endpoint, identity=name) for name in names]
    try:
        for caller in callers:
            caller.send(Message(Kind.EXCHANGE, EPOCH))
            await_answer(caller)
        yield callers
    finally:
        for caller in callers:
            caller.close()


def await_answer(caller: Caller) -> None:
    """Raises WireError if it does not come."""
    until_s = time.perf_counter() + _ANSWER_S
    while caller.receive() is None:
        left_s = until_s - time.perf_counter()
        if left_s <= 0:
            raise WireError(f"no answer within {_ANSWER_S:g} s from a host that answered before; see its load")
        caller.socket.poll(math.ceil(min(left_s, AGAIN_S) * 1000))


def answered(callers: Sequence[Caller]) -> list[int]:
    """How many pieces of each are taken in a second; at once without callers, whose host may be the one that takes."""
    if not callers:
        return []
    piece = Message(Kind.EXCHANGE, EPOCH, payload=[bytes(_PIECE_BYTES)])
    poller = zmq.Poller()
    for caller in callers:
        poller.register(caller.socket, zmq.POLLIN)
    by_socket = {caller.socket: number for number, caller in enumerate(callers)}
    counts = [0] * len(callers)
    for _ in range(_NUM_UNDER_WAY):
        for caller in callers:
            caller.send(piece)
    until_s = time.perf_counter() + _STREAM_S
    while (left_s := until_s - time.perf_counter()) > 0:
        for socket, _ in poller.poll(math.ceil(left_s * 1000)):
            number = by_socket[socket]
            if callers[number].receive() is not None:
                counts[number] += 1
                callers[number].send(piece)
    return counts
