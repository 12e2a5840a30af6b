"""What a key-value store refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.errors import UsageError
from paceline.kv import Function
from paceline.kv.client_core import ClientCore
from paceline.kv.key_cache import KeyCache
from paceline.kv.requests import Request
from paceline.kv.server_core import ServerCore
from paceline.kv.store import as_tensor
from paceline.messages import Kind, Message
from paceline.server.admission import BulkSynchronous, StaleSynchronous
from tests.unit.kv_spec import spec_of, tensor


@pytest.mark.parametrize(
    ("keys", "values", "complaint"),
    [
        (tensor([3, 3]), torch.ones(2, dtype=torch.float64), "3 follows 3"),
        (tensor([-1]), torch.ones(1, dtype=torch.float64), "keys -1 to -1"),
        (tensor([12]), torch.ones(1, dtype=torch.float64), "keys 12 to 12"),
        (torch.ones(2), torch.ones(2, dtype=torch.float64), "keys are int64"),
        (tensor([1]), torch.ones(2, dtype=torch.float64), r"values of shape \(1, 1\)"),
        (tensor([1]), torch.ones(1), "float32"),
        (range(0, 9, 2), torch.ones(5, dtype=torch.float64), "has gaps"),
    ],
)
def test_keys_and_values_that_do_not_fit_are_named(keys: Any, values: Tensor, complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        ClientCore(spec_of(), 0).ask(Kind.PUSH_VALUES, keys, values)


@pytest.mark.parametrize(
    ("keys", "complaint"),
    [
        ([1, 2.5], "keys are whole numbers, and 2.5 is none"),
        ([float("nan")], "keys are whole numbers, and nan is none"),
        (["a"], "keys are whole numbers, and 'a' is none"),
        ([1, -1], f"keys are whole numbers from 0 to {2**63 - 2}, and -1 is none"),
        ([2**63], f"and {2**63} is none"),
    ],
)
def test_a_list_with_what_is_no_key_is_refused(keys: Any, complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        as_tensor(keys)


@pytest.mark.parametrize("timestamp", [-1, 0, 1, "1"])
def test_a_request_cannot_wait_for_one_that_was_never_made(timestamp: Any) -> None:
    with pytest.raises(UsageError, match=f"no request of worker 0 has the timestamp {timestamp!r}"):
        ClientCore(spec_of(), 0).ask(Kind.PULL_VALUES, tensor([1]), after=[timestamp])


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"rule": "ssp"}, "needs a bound"),
        ({"rule": "no.such:thing"}, "servers cannot import 'no.such:thing'"),
        ({"rule": "paceline.kv.spec:MOST_KEYS"}, "names nothing to call"),
        ({"rule": "bsp", "rule_options": {"backup_workers": 1}}, "decides alike"),
        ({"rule": "bsp", "rule_options": {"late": 1}}, "unexpected keyword"),
        ({"functions": {"f": Function("math:nothing")}}, "servers cannot import 'math:nothing'"),
        ({"functions": {"add": Function("math:sqrt")}}, "has a function 'add' already"),
        ({"rule": "asp", "rule_options": {"staleness": 0}}, "'asp' has no options"),
        ({"servers": 0}, "servers of a store must be a whole number from 1"),
        ({"dtype": torch.int64}, "floating-point"),
    ],
)
def test_stores_that_cannot_be_are_refused(settings: Any, complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        ServerCore(spec_of(**settings), 0)


def plain(**about: Any) -> Message:
    push = Request(Kind.PUSH_VALUES, 0, 1, tensor([1, 2]), torch.ones(2, 1, dtype=torch.float64), within=range(0, 6))
    message = push.message(KeyCache())
    body = {**message.body, **about.pop("body", {})}
    return Message(
        **{"kind": message.kind, "epoch": 1, "sender": 0, "clock": 1, "body": body, "payload": message.payload, **about}
    )


@pytest.mark.parametrize(
    "message",
    [
        plain(kind=Kind.EXCHANGE),
        plain(sender=7),
        plain(clock=0),
        plain(body={"after": [1]}),
        plain(body={"after": "abc"}),
        plain(body={"clock": -1}),
        plain(body={"within": [0, 99]}),
        plain(body={"within": [2, 6]}),
        plain(body={"within": None}),
        plain(body={"range": [0, 2**62]}),
        plain(body={"range": [0, "x"]}),
        plain(body={"count": 10**15}),
        plain(body={"count": True}),
        plain(body={"function": "rm"}),
        plain(payload=[b""]),
        plain(payload=[tensor([2, 1]).numpy().tobytes(), bytes(16)]),
        plain(payload=[tensor([1, 9]).numpy().tobytes(), bytes(16)]),
    ],
)
def test_a_server_refuses_what_is_no_request_and_goes_on(message: Message) -> None:
    server = ServerCore(spec_of(), 0)
    [(_, answer)] = server.receive(message)
    assert answer.kind is Kind.ERROR
    assert answer.body["error"].startswith("server 0: ")
    assert len(server.rows.keys) == 0
    fine = plain(sender=1)
    assert [send.message.kind for send in server.receive(fine)] == [Kind.OK]


def test_a_forgotten_list_of_keys_is_refused() -> None:
    server, cache, keys = ServerCore(spec_of(), 0), KeyCache(), tensor([1])
    known = Request(Kind.PULL_VALUES, 0, 1, keys)
    known.message(cache)
    [(_, answer)] = server.receive(known.message(cache))
    assert "no list of keys has the signature" in answer.body["error"]


def test_rules_are_those_of_the_servers() -> None:
    assert isinstance(spec_of(rule="bsp").admission_rule(), BulkSynchronous)
    assert isinstance(spec_of().admission_rule(), StaleSynchronous)
