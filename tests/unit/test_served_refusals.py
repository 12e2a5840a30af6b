"""What a served run's server refuses: updates of another form, rubbish, and tickets that are not believed."""

from __future__ import annotations

import struct
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from paceline.messages import Kind, Message
from paceline.roster import BySize
from paceline.served.form import EPOCH, VERSION, Refused
from tests.unit.served_run import (
    PIECE_BYTES,
    VECTOR,
    Run,
    attached,
    key_of,
    small_pieces,  # noqa: F401 - for every test
    state_of,
    update_of,
)


def test_a_revoked_ticket_is_refused_from_the_next_message_on() -> None:
    run = Run()
    lost, kept = run.start(1), run.start(2)
    run.calm()
    run.revoked.add(1)
    before = run.number
    run.calm(rounds=40)
    assert lost.core.failure == "this ticket was revoked"
    assert all(run.accepted[number] == [2] for number in range(before + 1, run.number))
    assert kept.core.failure is None


def piece(run: Run, **changed: Any) -> Message:
    fields = {"iteration": run.number, "shard": 0, "tensor_bytes": VECTOR.num_bytes, "payload": [b"\0" * PIECE_BYTES]}
    return Message(Kind.UPDATE, EPOCH, **{**fields, **changed})


@pytest.mark.parametrize(
    ("sent", "said"),
    [
        ({"tensor_bytes": 10 * 2**30}, "announces an update of 10,737,418,240 bytes, not of 48"),
        ({"payload": [b"\0" * (PIECE_BYTES - 1)]}, "has 19 bytes"),
        ({"body": {"scale": float("nan")}}, "number of steps is nan"),
        ({"body": {"scale": -1}}, "number of steps is -1"),
        ({"body": {"scale": "1"}}, "number of steps is 1"),
        ({"shard": -1}, "comes twice"),
    ],
)
def test_an_update_of_another_form_is_refused_with_its_reason(sent: dict[str, Any], said: str) -> None:
    run = Run()
    process = attached(run)
    run.core.receive(process.route, key_of(0), piece(run, **sent).encode(), run.now_s)
    assert [said in each.text for each in run.core.log] == [True]
    run.serve()
    assert run.accepted[0] == []
    assert (run.is_open, run.number) == (False, 1)  # nobody waits for it any more


@pytest.mark.parametrize("samples", [10**18, 0, -3, True, 1.5, "7", None, [1]])
def test_a_client_that_says_that_it_has_impossible_samples_is_refused(samples: Any) -> None:
    run = Run()
    process = run.start(0)
    run.core.receive(process.route, key_of(0), Message(Kind.JOIN, EPOCH, body={"version": VERSION}).encode(), 0.0)
    body = {"samples": samples, "state": VECTOR.described(), "update": VECTOR.described()}
    run.core.receive(process.route, key_of(0), Message(Kind.ATTACH, EPOCH, body=body).encode(), 0.0)
    run.serve()
    while process.coming:
        process.take(0.0)
    assert "samples, which nobody has" in (process.core.failure or "")
    assert run.core.present(0.0) == []


def test_a_client_counts_at_most_ten_times_as_much_as_the_median_one() -> None:
    run = Run()
    for client, samples in enumerate((10, 20, 10**9)):
        attach(run, client, samples=samples)
    assert run.core.open(0, state_of(0), 0.0)
    for client in range(3):
        content = bytes(update_of(client, 0))
        for index in range(3):
            part = content[index * PIECE_BYTES : (index + 1) * PIECE_BYTES]
            run.core.receive(
                b"route-%d" % client, key_of(client), piece(run, shard=index, payload=[part]).encode(), 0.0
            )
    assert [arrival.weight for arrival in run.core.arrivals] == [10.0, 20.0, 200.0]


def attach(run: Run, client: int, *, samples: int) -> None:
    route = b"route-%d" % client
    run.core.receive(route, key_of(client), Message(Kind.JOIN, EPOCH, body={"version": VERSION}).encode(), 0.0)
    body = {"samples": samples, "state": VECTOR.described(), "update": VECTOR.described()}
    run.core.receive(route, key_of(client), Message(Kind.ATTACH, EPOCH, body=body).encode(), 0.0)


@pytest.mark.parametrize("weighs", [True, False])
def test_a_client_that_is_drawn_twice_counts_twice_and_no_claim_of_samples_has_it_drawn_always(weighs: bool) -> None:
    run = Run()
    run.rules = replace(run.rules, sampler=BySize(), weighs=weighs, outweigh=2.0)
    run.restart()
    for client, samples in enumerate((10, 10, 10**12)):
        attach(run, client, samples=samples)
    turns: Counter[int] = Counter()
    for number in range(40):
        assert run.core.open(number, state_of(number), 0.0)
        turns.update(list(run.core._turns))
        weights = [turn.weight for turn in run.core._turns.values()]
        assert sum(weights) >= 30 if weighs else sum(weights) == 3
        run.core.close(0.0)
    assert min(turns.values()) >= 10


@pytest.mark.parametrize("theirs", [[], None, "x", [["weight", "torch.float64", [2, 3]]], [["weight"]], [[1, 2, 3]]])
def test_other_tensors_are_named(theirs: Any) -> None:
    with pytest.raises(Refused, match=r"its script"):
        VECTOR.require(theirs)


def test_malformed_messages_leave_a_few_lines_and_nothing_else() -> None:
    """A ticket under which a hundred came is not believed any more."""
    run = Run(min_clients=2)
    attached(run, 0)
    other = attached(run, 1)
    frames = [[b"P1" + b"\xff" * 54, b""], [b"", b"", b"", b""], [struct.pack("<2sB", b"P1", 1), b"{" * 100]]
    for number in range(10_000):
        run.core.receive(b"route-9", key_of(0), list(frames[number % 3]), run.now_s)
    assert len(run.core.log) <= 5
    assert "nothing of its is taken from here on" in run.core.log[-1].text
    assert run.core.outbox == []
    other.train()
    while other.sent:
        run.hear(other)
    assert run.accepted[0] == [1]


def test_a_client_with_a_ticket_cannot_fill_the_log() -> None:
    run = Run()
    process = attached(run)
    for _ in range(1000):
        run.core.receive(process.route, key_of(0), piece(run, iteration=77).encode(), run.now_s)
    assert len(run.core.log) == 20
    assert run.core.log[-1].text.endswith("what else it does in this round is not told")
