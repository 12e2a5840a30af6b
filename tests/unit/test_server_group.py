"""A worker's end of servers on other hosts: what it sends, and when."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, closing

import pytest
import torch

from paceline.comm import wire
from paceline.comm.servers import group as server_group
from paceline.comm.servers.group import ServerGroup
from paceline.comm.servers.line import WorkerLine
from paceline.comm.servers.payload import ReceivedPayload
from paceline.comm.servers.service import ParameterService
from paceline.comm.servers.sockets import WAKE_S, SocketCarrier
from paceline.comm.wire import Keys, Listener
from paceline.engines.striking import connections
from paceline.errors import Aborted, DeadlineExceeded, PacelineError, PeerLost
from paceline.layout import TensorSpec, by_group
from paceline.membership import Membership
from paceline.messages import Kind, Message, Raw, WireError
from paceline.records import NullReporter
from paceline.server import client_core, server_core
from paceline.server.actions import Send
from paceline.server.admission import AdmissionRule, BulkSynchronous, StaleSynchronous
from paceline.server.client_core import ClientCore
from paceline.server.shard import Shard
from paceline.server.spec import OptimizerSpec, Push
from paceline.server.windows import LEAST_ANSWERS, PIECES_UNDER_WAY
from tests.unit.server_groups import EPOCH, attached

NUM_PIECES = 16
FOREVER = 10**9
ENOUGH_S = 0.5  # for what must not be sent to be


def group_of_one(
    rule: AdmissionRule, *, has_server_here: bool = False, is_beside_another: bool = False
) -> AbstractContextManager[ServerGroup]:
    """Worker 0, attached to a server elsewhere that holds a model of `NUM_PIECES`, or half of one.

    Args:
        has_server_here: the other half is on a server on the worker's host.
        is_beside_another: the server elsewhere shares its host with another worker, as far as it knows.
    """
    layout = by_group([TensorSpec("weight", (NUM_PIECES * 64,), torch.float32, 0)])
    spec = OptimizerSpec(torch.optim.SGD, {"lr": 0.1}, ({"lr": 0.1},), element_wise=True)
    are_here = [False, True] if has_server_here else [False]
    return attached(layout, spec, rule, are_here=are_here, is_beside_another=is_beside_another)


def abort_once(group: ServerGroup, is_there: Callable[[], bool]) -> None:
    """From another thread, some time after what is to come has come, in which more would."""

    def abort() -> None:
        while not is_there():
            time.sleep(0.01)
        time.sleep(ENOUGH_S)
        group.abort("the test has seen enough")

    threading.Thread(target=abort, daemon=True).start()


def test_silent_servers_are_named_when_the_deadline_is_over() -> None:
    with group_of_one(BulkSynchronous(Membership.first(2))) as group:
        group._carrier._deadline_s = ENOUGH_S  # type: ignore[attr-defined]
        with pytest.raises(
            DeadlineExceeded, match=r"server\(s\) \[0\] did not answer within 0\.5 s to: exchange of clock 0"
        ):
            group.exchange(Push(pause_at=FOREVER))


def test_a_request_on_a_line_whose_tensors_cannot_be_had_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    real = ReceivedPayload.read

    def no_descriptors(payload: ReceivedPayload) -> list[Raw]:
        if threading.current_thread() is threading.main_thread():
            return real(payload)
        raise PeerLost("no descriptors are left")

    with group_of_one(BulkSynchronous(Membership.first(1)), has_server_here=True) as group:
        monkeypatch.setattr(ReceivedPayload, "read", no_descriptors)
        group._carrier._deadline_s = 60.0  # type: ignore[attr-defined]
        with pytest.raises(PacelineError, match="no descriptors are left"):
            group.exchange(Push(pause_at=FOREVER))
        monkeypatch.undo()


@pytest.fixture
def pushed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one with each piece that reaches a server."""
    seen: list[int] = []
    push = Shard.push

    def noted(shard: Shard, worker: int, *rest: object, **options: object) -> object:
        seen.append(worker)
        return push(shard, worker, *rest, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(Shard, "push", noted)
    for module in (server_group, client_core, server_core):
        monkeypatch.setattr(module, "FRAME_BYTES", 256)
    return seen


def test_a_worker_sends_no_more_than_a_few_pieces_ahead_of_the_answers(pushed: list[int]) -> None:
    with group_of_one(BulkSynchronous(Membership.first(2))) as group:
        abort_once(group, lambda: len(pushed) >= PIECES_UNDER_WAY)
        with pytest.raises(Aborted, match="the test has seen enough"):
            group.exchange(Push(pause_at=FOREVER))
        assert len(pushed) == PIECES_UNDER_WAY


def test_every_piece_is_sent_in_its_turn(pushed: list[int]) -> None:
    with group_of_one(BulkSynchronous(Membership.first(1)), is_beside_another=True) as group:
        for clock in range(3):
            assert group.exchange(Push(pause_at=FOREVER)).iteration == clock + 1
            assert len(pushed) == (clock + 1) * NUM_PIECES


@pytest.mark.skipif(bool(connections.lack()), reason=connections.lack())
@pytest.mark.parametrize(
    "rule", [BulkSynchronous(Membership.first(1)), StaleSynchronous(Membership.first(1), staleness=FOREVER)]
)
def test_each_piece_counts_once_though_connections_break(
    pushed: list[int], rule: AdmissionRule, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the server takes the first piece of an exchange, one in the midst of the next, and the last of a third."""
    push = Shard.push
    num_cut: list[int] = []

    def cutting(shard: Shard, *rest: object, **options: object) -> object:
        answer = push(shard, *rest, **options)  # type: ignore[arg-type]
        if len(pushed) in (1, NUM_PIECES + NUM_PIECES // 2, 3 * NUM_PIECES):
            num_cut.append(cut(port))
        return answer

    with group_of_one(rule, is_beside_another=True) as group:
        port = int(group._carrier._links[0].caller._endpoint.rsplit(":", 1)[1])  # type: ignore[attr-defined]
        monkeypatch.setattr(Shard, "push", cutting)
        for clock in range(4):
            assert group.exchange(Push(pause_at=FOREVER)).iteration == clock + 1
        assert len(pushed) == 4 * NUM_PIECES
    assert len(num_cut) == 3
    assert min(num_cut) >= 2, "each cut closes both ends"


def cut(port: int) -> int:
    """How many ends of connections are closed by it."""
    before = [ends for ends in connections.own_connections() if port in (ends[0][1], ends[1][1])]
    connections.cut(before)
    return len({*before} - {*connections.own_connections()})


@pytest.mark.skipif(bool(connections.lack()), reason=connections.lack())
def test_a_server_goes_on_to_its_next_copy_though_that_is_busy_as_their_connection_breaks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So that it does not let the first new connection in, on which it is asked to begin again."""
    monkeypatch.setattr(wire, "AGAIN_S", 0.2)
    keys = Keys.generate()
    service = ParameterService(keys, host="127.0.0.1", index=0, epoch=EPOCH, reporter=NullReporter())
    with closing(Listener(keys, host="127.0.0.1")) as busy:
        service._next_copies.endpoints = {1: busy.endpoint}
        for number in range(3):
            service._next_copies.send(0, 1, Message(Kind.REPLICATE, EPOCH, clock=number))
        thread = threading.Thread(target=service.serve)
        thread.start()
        try:
            assert busy.socket.poll(60_000)
            assert cut(int(busy.endpoint.rsplit(":", 1)[1])) == 2
            time.sleep(0.3)
            delivery, until_s = service._next_copies._ways[0].caller._delivery, time.monotonic() + 60
            heard = []
            while not delivery.is_settled and time.monotonic() < until_s:
                if busy.socket.poll(50) and (arrived := busy.receive()) is not None:
                    heard.append(Message.decode(arrived[1], epoch=EPOCH).clock)
            assert not delivery.is_asking
            assert heard == [0, 1, 2]
        finally:
            service.stop()
            thread.join()


def test_a_server_sends_no_more_than_a_few_answers_before_they_have_come(
    pushed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_core, "PIECES_UNDER_WAY", NUM_PIECES)
    send, receive = SocketCarrier._send, ClientCore.receive
    num_answers = 0

    def all_but_receipts(carrier: SocketCarrier, sends: Iterable[Send]) -> None:
        send(carrier, [each for each in sends if each.message.kind is not Kind.RECEIVED])

    def noted(client: ClientCore, index: int, answer: Message) -> Iterator[Send]:
        nonlocal num_answers
        num_answers += answer.kind is Kind.ANSWER
        return receive(client, index, answer)

    monkeypatch.setattr(SocketCarrier, "_send", all_but_receipts)
    monkeypatch.setattr(ClientCore, "receive", noted)
    with group_of_one(BulkSynchronous(Membership.first(1)), is_beside_another=True) as group:
        abort_once(group, lambda: len(pushed) >= NUM_PIECES and num_answers >= LEAST_ANSWERS)
        with pytest.raises(Aborted, match="the test has seen enough"):
            group.exchange(Push(pause_at=FOREVER))
    assert num_answers == LEAST_ANSWERS


def test_word_of_an_answer_that_was_not_sent_is_refused(pushed: list[int]) -> None:
    with group_of_one(BulkSynchronous(Membership.first(1)), is_beside_another=True) as group:
        group._carrier._send([Send(0, Message(Kind.RECEIVED, EPOCH))])  # type: ignore[attr-defined]
        with pytest.raises(WireError, match="refused word from worker 0 of an answer that it was not sent"):
            group.exchange(Push(pause_at=FOREVER))


def test_gradients_that_are_applied_when_they_come_are_not_kept_back(pushed: list[int]) -> None:
    """Though the answers are: a worker may not be ahead of the other one here."""
    with group_of_one(StaleSynchronous(Membership.first(2), staleness=0)) as group:
        abort_once(group, lambda: len(pushed) >= NUM_PIECES)
        with pytest.raises(Aborted, match="the test has seen enough"):
            group.exchange(Push(pause_at=FOREVER))
        assert len(pushed) == NUM_PIECES


def test_shards_that_follow_a_decision_are_sent_all_at_once(pushed: list[int]) -> None:
    """The last one decides; until it has, none is answered."""
    with group_of_one(BulkSynchronous(Membership.first(2), backup_workers=1)) as group:
        assert group.exchange(Push(pause_at=FOREVER)).iteration == 1
        assert len(pushed) == NUM_PIECES


def test_a_worker_that_waits_for_servers_here_and_elsewhere_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    num_looks = 0
    receive = WorkerLine.receive

    def noted(line: WorkerLine, **options: float) -> object:
        nonlocal num_looks
        num_looks += 1
        return receive(line, **options)

    monkeypatch.setattr(WorkerLine, "receive", noted)
    with group_of_one(BulkSynchronous(Membership.first(2)), has_server_here=True) as group:
        num_looks, began_s = 0, time.monotonic()
        threading.Timer(ENOUGH_S, group.abort, ["the test has seen enough"]).start()
        with pytest.raises(Aborted, match="the test has seen enough"):
            group.exchange(Push(pause_at=FOREVER))
        took_s = time.monotonic() - began_s
    assert num_looks < 10 * took_s / WAKE_S
