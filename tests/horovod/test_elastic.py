"""Elastic jobs as a script sees them: what it keeps, how it goes back, and who is there afterwards."""

from __future__ import annotations

import io
import itertools
import os
import random
import signal
import socket
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import paceline.horovod.torch as hvd
from paceline.comm.shared_memory.collective import SharedMemoryCollective
from paceline.errors import PeerLost, RunFailed
from paceline.horovod import runtime
from paceline.horovod.common.elastic import ObjectState, State, run_fn
from paceline.horovod.elastic_jobs import joining
from paceline.horovod.errors import HorovodInternalError, HostsUpdatedInterrupt
from paceline.horovod.line import Line, Unframer, framed
from paceline.horovod.processes import _copy
from paceline.horovod.recording import Standing
from paceline.horovod.torch.elastic import ElasticSampler, TorchState
from paceline.horovod.torch.elastic.state import ModelStateHandler, get_handler_registry, set_handler_registry
from tests.horovod.elastic_fleet import ForkedFleet

REMOVED, ADDED = 1, 2


def states() -> tuple[TorchState, torch.nn.Linear, Any]:
    model = torch.nn.Linear(2, 1)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    return TorchState(model, optimizer, step=0, seen=[1]), model, optimizer


def step(model: torch.nn.Module, optimizer: Any) -> None:
    optimizer.zero_grad()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()


def test_restore_goes_back_to_the_last_commit(alone: None) -> None:
    state, model, optimizer = states()
    step(model, optimizer)
    state.step = 1
    state.seen.append(2)
    state.commit()
    kept = [each.clone() for each in model.parameters()]
    moment = optimizer.state_dict()["state"][0]["momentum_buffer"].clone()
    step(model, optimizer)
    state.step = 2
    state.seen.append(3)
    state.restore()
    assert (state.step, state.seen) == (1, [1, 2])
    assert all(torch.equal(one, other) for one, other in zip(kept, model.parameters(), strict=True))
    assert torch.equal(optimizer.state_dict()["state"][0]["momentum_buffer"], moment)


def test_gradients_under_way_are_forgotten_by_restore(alone: None) -> None:
    state, model, optimizer = states()
    model(torch.ones(1, 2)).sum().backward()
    with pytest.raises(AssertionError, match="zero_grad"):
        optimizer.zero_grad()
    state.restore()
    step(model, optimizer)


def test_an_object_s_value_is_kept_and_not_the_object(alone: None) -> None:
    fellow = object()
    state = ObjectState(lambda each: each, lambda: 0, table={"a": [torch.zeros(2)]}, fellow=fellow)
    state.table["a"][0] += 1
    state.restore()
    assert state.table["a"][0].tolist() == [0, 0]  # type: ignore[attr-defined]
    assert state.fellow is fellow  # type: ignore[attr-defined]


def test_a_value_that_takes_another_s_place_is_followed(alone: None) -> None:
    state, _, _ = states()
    other = torch.nn.Linear(2, 1)
    state.model = other
    before = other.weight.detach().clone()
    with torch.no_grad():
        other.weight += 1
    state.restore()
    assert torch.equal(other.weight, before)


def test_types_of_one_s_own_have_handlers_of_their_own(alone: None) -> None:
    class Average:
        def state_dict(self) -> dict[str, Any]:
            return {"value": torch.tensor(self.value)}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.value = float(state["value"])

        value = 1.0

    before = get_handler_registry()
    set_handler_registry([*before, (Average, ModelStateHandler)])
    try:
        average = Average()
        state = TorchState(average=average)
        average.value = 2.0
        state.restore()
        assert average.value == 1.0
    finally:
        set_handler_registry(before)


@pytest.mark.parametrize(("updates", "skips"), [([REMOVED], True), ([ADDED], False), ([REMOVED, ADDED], False)])
def test_changes_of_hosts_interrupt_a_commit(updates: list[int], skips: bool) -> None:
    state = ObjectState(lambda each: each, lambda: 0, step=0)
    state.check_host_updates()
    for number, update in enumerate(updates, 1):
        state.on_hosts_updated(float(number), update)
    state.step = 3  # type: ignore[attr-defined]
    with pytest.raises(HostsUpdatedInterrupt) as interrupt:
        state.commit()
    assert interrupt.value.skip_sync is skips
    state.restore()
    assert state.step == 3  # type: ignore[attr-defined]  # it was saved before
    state.on_hosts_updated(1.0, ADDED)  # which is not newer
    state.check_host_updates()


def test_how_a_function_is_called_anew() -> None:
    calls: list[str] = []

    class Noted(State):
        def save(self) -> None:
            calls.append("save")

        def restore(self) -> None:
            calls.append("restore")

        def sync(self) -> None:
            calls.append("sync")

        def reset(self) -> None:
            calls.append("state.reset")

    ends = iter([HorovodInternalError("a rank is gone"), HostsUpdatedInterrupt(skip_sync=True),
                 HostsUpdatedInterrupt(skip_sync=False)])  # fmt: skip

    def train(state: State, word: str) -> str:
        calls.append("train")
        for end in ends:
            raise end
        return word

    state = Noted(lambda each: each, lambda: 0)
    state.register_reset_callbacks([lambda: calls.append("callback")])
    assert run_fn(train, lambda: calls.append("reset"))(state, "done") == "done"
    anew = ["reset", "state.reset", "callback"]
    wanted = ["sync", "train", "restore", *anew, "sync", "train", *anew, "train", *anew, "sync", "train"]
    assert calls == wanted


def sampled(size: int, rank: int, *, num: int, processed: int, epoch: int, seed: int) -> list[int]:
    """A rank's samples, by a loop."""
    order = list(range(num))
    random.Random(seed + epoch).shuffle(order)
    left = order[processed:]
    padded = list(left)
    while len(padded) % size:
        padded.append(left[len(padded) % len(left)])
    return [sample for place, sample in enumerate(padded) if place % size == rank]


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_samples_are_those_of_horovod(size: int, monkeypatch: pytest.MonkeyPatch) -> None:

    for rank in range(size):
        monkeypatch.setattr(runtime, "_runtime", type("Here", (), {"size": size, "rank": rank}))
        sampler = ElasticSampler(range(23), seed=7)
        sampler.set_epoch(2)
        assert [*sampler] == sampled(size, rank, num=23, processed=0, epoch=2, seed=7)
        sampler.record_batch(0, 4)
        about = sampler.state_dict()
        sampler.load_state_dict(about)
        assert [*sampler] == sampled(size, rank, num=23, processed=4 * size, epoch=2, seed=7)
        assert len(sampler) == len([*sampler])
        sampler.load_state_dict({"epoch": 2, "processed_num": 22})  # fewer are left than ranks
        assert [*sampler] == sampled(size, rank, num=23, processed=22, epoch=2, seed=7)
    assert [*ElasticSampler(range(4), shuffle=False)] == [*range(4)][size - 1 :: size] or size in (3, 5)


def test_messages_go_past_the_script_s_output() -> None:
    heard: list[Any] = []
    unframer = Unframer("mark", heard.append)
    long = {"kind": "result", "value": "x" * 10_000}
    lines = framed("mark", long)
    assert len(lines) == 4
    assert all(len(line) < 4096 for line in lines)  # which a pipe takes whole
    said = ["plain\n", "begun, ", *framed("mark", {"kind": "ask"}), *lines, "and ended\n", "without end"]
    joined = "".join(said).splitlines(keepends=True)
    shown = [unframer.output_of(line) for line in joined]
    assert [each for each in shown if each] == ["plain\n", "begun, and ended\n", "without end"]
    assert heard == [{"kind": "ask"}, long]
    unframer.output_of(f"begun{framed('mark', {})[0]}")
    assert unframer.rest() == "begun"


def test_processes_of_one_worker_speak_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[Any] = []
    unframer = Unframer("mark", heard.append)
    said = [{"kind": "records", "records": [letter * 5000]} for letter in "ab"]
    pieces = []
    for process, message in enumerate(said):
        monkeypatch.setattr(os, "getpid", lambda process=process: 100 + process)
        pieces.append(framed("mark", message))
    for line in itertools.chain(*zip(*pieces, strict=True)):
        assert unframer.output_of(line) == ""
    assert heard == said


def test_a_message_that_cannot_be_read_is_told_once_and_the_rest_is_copied(capsys: pytest.CaptureFixture[str]) -> None:
    def hear(said: dict[str, Any]) -> None:
        raise KeyError(said["kind"])

    source = io.StringIO("".join([*framed("mark", {"kind": "new"}) * 2, "\x02mark torn\n", "plain\n"]))
    target = io.StringIO()
    _copy(source, target, "stdout", lambda: "3", Unframer("mark", hear))
    assert target.getvalue() == "[3]<stdout>:plain\n"
    assert capsys.readouterr().err == "[3]<stderr>:a message of this worker's cannot be read: KeyError('new')\n"


def test_a_first_rank_that_dies_before_it_keeps_the_store_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    class OfTheDead(Line):
        """Gives a place behind a first rank whose port is closed."""

        def say(self, kind: str, **values: Any) -> None:
            raise AssertionError("it has no records")

        def _ask(self, mine: Any) -> dict[str, Any]:
            with socket.socket() as other, pytest.raises(OSError, match="in use"):
                other.bind(("", mine["port"]))  # which is kept meanwhile
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                dead = {"address": "127.0.0.1", "port": probe.getsockname()[1]}
            first = {**dead, "member": {**mine["member"], "host": "another"}}
            place = {"RANK": 1, "SIZE": 2, "LOCAL_RANK": 0, "LOCAL_SIZE": 1}
            return {"epoch": 1, "has_newcomers": True, "place": place, "members": [first, dict(mine)]}

    memory = SharedMemoryCollective.prepare()
    monkeypatch.setattr(joining.SharedMemoryCollective, "prepare", lambda: memory)
    monkeypatch.setattr(joining, "keep_freed_memory", lambda: None)
    monkeypatch.setattr(torch, "set_num_threads", lambda num: None)
    monkeypatch.setattr(os, "environ", {**os.environ, "HOROVOD_GLOO_TIMEOUT_SECONDS": "0.2"})
    with pytest.raises(PeerLost, match="rank 0 is lost, which was to keep the store"):
        joining.join(OfTheDead(), Standing())
    assert not memory.buffer.nbytes


def training(tell: Callable[[Any], None], *, dies: tuple[int, ...] = (), num_changes: int = 0) -> None:
    """Steps whose every gradient is known; the ranks of `dies` are killed in the eighth, when five are committed.

    Args:
        num_changes: the work goes on until the workers have changed so often, and twelve steps more.
    """
    hvd.init()
    first = hvd.rank()
    model = torch.nn.Linear(2, 1, bias=False)  # whose gradient is one, for inputs of one
    torch.nn.init.constant_(model.weight, float(first))  # that of rank 0 counts
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0))
    state = TorchState(model, optimizer, step=0, sizes=[], left=12)

    @hvd.elastic.run
    def train(state: Any) -> None:
        state.sizes = [*state.sizes, hvd.size()]
        while state.left:
            if state.step == 7 and first in dies and hvd.size() > 1:
                os.kill(os.getpid(), signal.SIGKILL)
            step(model, optimizer)
            state.step += 1
            state.left -= len(state.sizes) > num_changes
            tell(("step", os.getpid(), state.step, hvd.rank(), hvd.size(), round(float(model.weight[0, 0]), 3)))
            time.sleep(0.01)
            if state.step % 5 == 0:
                state.commit()

    train(state)
    tell(("done", hvd.rank(), state.sizes, state.step + round(float(model.weight[0, 0]), 3)))


def dying(tell: Callable[[Any], None]) -> None:
    training(tell, dies=(0,))


def dying_all(tell: Callable[[Any], None]) -> None:
    training(tell, dies=(0, 1))


def long_training(tell: Callable[[Any], None]) -> None:
    training(tell, num_changes=2)


@pytest.mark.parametrize("shares_memory", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_survivors_of_a_killed_worker_go_back_to_the_last_commit(shares_memory: bool) -> None:
    said = ForkedFleet(dying, {"a": 1, "b": 1, "c": 1}, shares_memory=shares_memory).run()
    assert sorted(each[1:] for each in said if each[0] == "done") == [(0, [3, 2], 0.0), (1, [3, 2], 0.0)]
    for pid in {each[1] for each in said if each[0] == "step" and each[4] == 2}:
        steps = [each[2] for each in said if each[0] == "step" and each[1] == pid]
        assert steps == [1, 2, 3, 4, 5, 6, 7, 6, 7, 8, 9, 10, 11, 12]


def test_all_hosts_that_fail_end_the_job() -> None:
    with pytest.raises(RunFailed, match=r"first rank \d on [ab] was ended by signal 9"):
        ForkedFleet(dying_all, {"a": 1, "b": 1}).run()


def test_hosts_come_and_go_while_the_job_runs() -> None:
    fleet = ForkedFleet(long_training, {"a": 1, "b": 1})

    def look(said: Any) -> None:
        if said[0] == "step" and said[2] == 20:
            fleet.slots = {"a": 1, "b": 1, "c": 1}
        if said[0] == "step" and said[4] == 3 and fleet.slots.get("a"):
            fleet.slots = {"b": 1, "c": 1}

    fleet.on_said = look
    said = fleet.run()
    assert sorted(each[1:] for each in said if each[0] == "done") == [(0, [2, 3, 2], 0.0), (1, [2, 3, 2], 0.0)]
    assert all(each[5] == -float(each[2]) for each in said if each[0] == "step")  # whoever came got the first's model
    by_worker: dict[int, list[int]] = {}
    for each in said:
        if each[0] == "step":
            by_worker.setdefault(each[1], []).append(each[2])
    assert all(steps == [*range(steps[0], steps[-1] + 1)] for steps in by_worker.values())  # nobody went back
    assert [event.name for event in fleet.noted] == ["reformed"] * 2
    details = [event.details for event in fleet.noted]
    about = [(each["epoch"], each["ranks"], each["joined"], each["hosts"]) for each in details]
    assert about == [(2, [0, 1, 2], [2], ["a", "b", "c"]), (3, [1, 2], [], ["b", "c"])]
    assert all(0.0 <= each["took_s"] < 60.0 for each in details)
