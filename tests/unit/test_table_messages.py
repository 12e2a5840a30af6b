"""Both ends of the tables' protocol: what counts, who is asked, and what is refused."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from paceline.messages import Kind, Message, WireError
from paceline.server.closing import Applied
from paceline.server.tables.hashing import owners
from tests.unit.one_table import DIM, NUM_ROWS, Net, gradients_of, spec_of


@settings(max_examples=10, deadline=None)
@given(
    keys=st.lists(st.lists(st.integers(0, NUM_ROWS - 1), max_size=6), min_size=3, max_size=3),
    weights=st.lists(st.floats(0.1, 3.0), min_size=3, max_size=3),
    num_servers=st.integers(1, 3),
)
def test_an_update_is_the_weighted_mean_of_all_workers(
    keys: list[list[int]], weights: list[float], num_servers: int
) -> None:
    net = Net(spec_of("sgd:lr=1", std=0.0), num_servers=num_servers, num_workers=3)
    found = [gradients_of(each, worker) for worker, each in enumerate(keys)]
    net.update({worker: (weights[worker], found[worker] if keys[worker] else None) for worker in range(3)})
    expected = torch.zeros(NUM_ROWS, DIM, dtype=torch.float64)
    for weight, (own, values) in zip(weights, found, strict=True):
        expected[own] -= weight / sum(weights) * values
    torch.testing.assert_close(net.read(range(NUM_ROWS), worker=2), expected)


def test_one_update_has_one_learning_rate() -> None:
    """The worker whose rate is another one is told so when it gives it, before anything is updated."""
    net = Net(spec_of("sgd:lr=1", std=0.0), num_servers=2, num_workers=3)

    def push(worker: int, lr: float | None, *, clock: int, keys: Sequence[int] | None = (3,)) -> None:
        gradients = None if keys is None else gradients_of(keys, worker)
        net.ask(worker, net.clients[worker].push([gradients], weight=1.0, lrs=[lr], clock=clock))

    push(0, 0.5, clock=4)
    with pytest.raises(WireError, match=r"table 'users' learning rates from 0\.5 to 1 for one update"):
        push(1, None, clock=4)
    with pytest.raises(WireError, match=r"learning rates from 0\.5 to 2 for one update"):
        push(1, 2.0, clock=4, keys=())  # of an empty batch
    push(2, 2.0, clock=4, keys=None)  # did not use the table
    push(1, 0.5, clock=4)
    push(0, 0.25, clock=5)  # what it gave before was for no update
    push(1, 0.25, clock=5)
    for server in net.servers:
        server.update([Applied(1, worker, 5, 0) for worker in (0, 1)])
    mean = (gradients_of([3], 0).values + gradients_of([3], 1).values) / 2
    torch.testing.assert_close(net.read([3]), -0.25 * mean)


def test_where_workers_join_an_update_has_the_rate_of_the_first_that_uses_the_table() -> None:
    net = Net(spec_of("sgd:lr=1", std=0.0), num_servers=1, num_workers=3)
    net.servers[0].agrees_on_rates = False
    for worker, (lr, keys) in enumerate(((2.0, None), (0.5, [3]), (4.0, [3]))):
        gradients = None if keys is None else gradients_of(keys, 0)
        net.ask(worker, net.clients[worker].push([gradients], weight=1.0, lrs=[lr], clock=0))
    net.servers[0].update([Applied(1, worker, 0, 0) for worker in range(3)])
    torch.testing.assert_close(net.read([3]), -0.5 * 2 / 3 * gradients_of([3], 0).values)


@pytest.mark.parametrize(("counts", "is_made"), [(6, True), (5, False), (None, False)])
def test_of_a_worker_that_is_gone_those_rows_are_left_whose_push_counts(counts: int | None, is_made: bool) -> None:
    net = Net(spec_of("sgd:lr=1", std=0.0), num_servers=1)
    (server,) = net.servers
    net.ask(0, net.clients[0].push([gradients_of([3], 0)], weight=1.0, clock=6))
    server.let_go(0, clock=counts)
    assert server.has_waiting == is_made
    server.update([Applied(1, 0, 6, 0)])
    assert net.counts()["rows"] == int(is_made)


def test_rows_are_in_no_update_but_that_of_their_push() -> None:
    net = Net(spec_of("sgd:lr=1", std=0.0), num_servers=1)
    net.ask(0, net.clients[0].push([gradients_of([3], 0)], weight=1.0, clock=6))
    net.servers[0].update([Applied(1, 0, 5, 0)])
    assert net.servers[0].has_waiting
    assert net.counts()["rows"] == 0


def test_updates_of_one_worker_each_may_have_rates_of_their_own() -> None:
    net = Net(spec_of("sgd:lr=1", std=0.0), num_servers=1, num_workers=2)
    net.servers[0].joins = False
    for worker, lr in ((0, 0.5), (1, 2.0)):
        net.ask(worker, net.clients[worker].push([gradients_of([3], 0)], weight=1.0, lrs=[lr], clock=0))
        net.servers[0].update([Applied(1 + worker, worker, 0, 0)])
    torch.testing.assert_close(net.read([3]), -2.5 * gradients_of([3], 0).values)


def test_a_push_that_was_for_no_update_counts_nowhere() -> None:
    net = Net(spec_of("sgd:lr=1", std=0.0), num_servers=2, num_workers=2)
    net.push(1, 1.0, gradients_of([3], 0))
    net.update({0: (1.0, None)})
    net.update({1: (1.0, gradients_of([4], 1))})
    assert net.read([3]).count_nonzero() == 0
    torch.testing.assert_close(net.read([4]), -gradients_of([4], 1).values)


def test_only_servers_that_own_a_key_are_asked() -> None:
    net = Net(spec_of(), num_servers=200)
    assert len(net.clients[0].read({0: torch.arange(3)})) == len(owners(torch.arange(3), 200).unique())


def request(kind: Kind, body: object, *tensors: Tensor) -> Message:
    payload = [tensor.numpy().tobytes() for tensor in tensors]
    return Message(kind, 1, sender=0, body=json.loads(json.dumps(body)), payload=payload)


@pytest.mark.parametrize(
    ("message", "error"),
    [
        (request(Kind.READ_ROWS, {"tables": [1], "counts": [0]}), "there are 1 tables, and none of index 1"),
        (request(Kind.READ_ROWS, {"tables": ["0"], "counts": [0]}), "none of index '0'"),
        (request(Kind.READ_ROWS, {"tables": [0], "counts": [2**60]}), "1152921504606846976 keys in 0 bytes"),
        (
            request(Kind.READ_ROWS, {"tables": [0], "counts": [1]}, torch.tensor([1, 2])),
            "16 bytes of tensors instead of 8",
        ),
        (request(Kind.READ_ROWS, {"tables": [0], "counts": [1]}, torch.tensor([NUM_ROWS])), f"none of key {NUM_ROWS}"),
        (request(Kind.READ_ROWS, {"tables": [0], "counts": []}), "keys of 0 tables for 1"),
        (request(Kind.READ_ROWS, {"tables": 3, "counts": []}), "READ_ROWS"),
        (request(Kind.READ_ROWS, {}), "tables"),
        (request(Kind.PUSH_ROWS, {"weight": 0, "counts": [None]}), "weight 0"),
        (request(Kind.PUSH_ROWS, {"weight": True, "counts": [None]}), "weight True"),
        (request(Kind.PUSH_ROWS, {"weight": 1, "counts": []}), "rows of 0 tables"),
        (request(Kind.PUSH_ROWS, {"weight": 1, "counts": [None], "lrs": [-1]}), "lr must be a number of at least 0"),
        (request(Kind.PUSH_ROWS, {"weight": 1, "counts": [None], "lrs": ["1"]}), "lr must be a number, not '1'"),
        (request(Kind.PUSH_ROWS, {"weight": 1, "counts": [None], "lrs": []}), "PUSH_ROWS"),
        (request(Kind.PUSH_ROWS, {"weight": 1, "counts": 3}), "PUSH_ROWS"),
        (request(Kind.PUSH_ROWS, {"weight": 1, "counts": [-1]}), "-1 keys"),
        (
            request(
                Kind.PUSH_ROWS,
                {"weight": 1, "counts": [1]},
                torch.tensor([2]),
                torch.full((DIM,), math.inf, dtype=torch.float64),
            ),
            "table 'users': the gradient of key 2 is not finite",
        ),
        (request(Kind.OPEN_TABLES, {"tables": [{"name": "a"}]}), "no description of a table"),
        (request(Kind.OPEN_TABLES, {"tables": 3}), "OPEN_TABLES"),
        (request(Kind.GET_ROWS, {"table": None}), "none of index None"),
        (request(Kind.SET_ROWS, {"table": 0, "tensors": [["0.keys", "torch.int64", [2**60]]]}), "cannot be read|bytes"),
    ],
)
def test_messages_that_make_no_sense_are_refused(message: Message, error: str) -> None:
    net = Net(spec_of(), num_servers=1)
    with pytest.raises(WireError, match=error):
        net.servers[0].receive(message)
    assert not net.servers[0].has_waiting
    assert net.servers[0].receive(request(Kind.SHOW_ROWS, {}))  # it has its tables still
