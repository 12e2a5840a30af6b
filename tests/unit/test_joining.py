"""A worker takes another one's state: two sessions in one process, and a file between them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from paceline.comm.alone import AloneCollective
from paceline.config import RunConfig
from paceline.elastic import Elastic, Member
from paceline.engines.world import alone
from paceline.errors import BudgetReached, PeerLost, UsageError
from paceline.membership import Membership
from paceline.records import NullReporter
from paceline.strategies import build
from paceline.strategies.regrouping import Formed, ResultHandedOn
from paceline.training.elastic import Survivor
from paceline.training.given import told_apart
from paceline.training.session import Session
from paceline.training.sharding.orders import Orders

X = torch.randn(24, 4, generator=torch.Generator().manual_seed(0))
_sessions: list[Session] = []


@pytest.fixture(autouse=True)
def released() -> Iterator[None]:
    """No session watches over what later tests of this process do."""
    yield
    while _sessions:
        _sessions.pop().release()


@dataclass
class ByFile:
    """Both are told of one another here."""

    path: Path
    joins: bool = False
    asked_to_give: tuple[int, ...] = ()
    is_asked_to_leave: bool = False
    epoch: int = 0
    members: tuple[Member, ...] = ()
    has_left: bool = False

    def __call__(self, member: Member, last_result) -> Formed:
        self.members = (*self.members, member)
        formed = Member(member.rank, Membership(member.membership.epoch + 1, (0, 1)), member.applied)
        return Formed(formed, AloneCollective(), 0, 1)

    def give(self, write, *, member: Member, to: tuple[int, ...]) -> None:
        write(self.path)

    def take(self, *, rank: int, epoch: int) -> int | Path:
        return self.path if epoch >= self.epoch else self.epoch

    def leave(self, rank: int) -> None:
        self.has_left = True


@dataclass
class Script:
    session: Session
    model: nn.Module
    optimizer: Any
    scheduler: Any
    loader: Any

    def step(self, batch) -> None:
        self.optimizer.zero_grad()
        self.model(batch[0]).square().mean().backward()
        self.optimizer.step()
        self.scheduler.step()


def script(reform: ByFile, *, rank: int, features: int = 2, strategy: str = "all-reduce") -> Script:
    context = replace(
        alone().context,
        rank=rank,
        membership=Membership(1, (rank,)),
        device=torch.device("cpu"),
        reform=reform,
        num_at_start=1,
    )
    elastic = Elastic(at_least=1, at_most=2, global_batch="keep" if strategy == "all-reduce" else "grow")
    options = {} if strategy in ("all-reduce", "gossip") else {"every": "1"}
    session = Session(context, build(strategy, options), RunConfig(elastic=elastic), NullReporter())
    _sessions.append(session)
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(4, features), nn.BatchNorm1d(features))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    loader = DataLoader(TensorDataset(torch.arange(24), X), batch_size=4, shuffle=True)
    given = told_apart((model, optimizer, loader), {"scheduler": scheduler})
    [sharded] = session.prepare(given).values()
    return Script(session, model, optimizer, scheduler, sharded)


def given_state(path: Path, *, epochs: int) -> tuple[Script, list[int]]:
    """A script that trains for so many epochs and two steps, and gives its state; and the samples it is at."""
    reform = ByFile(path)
    first = script(reform, rank=0)
    for _ in range(epochs):
        for _, x in first.loader:
            first.step([x])
    for number, (index, x) in enumerate(first.loader):
        if number == 2:
            return first, index.tolist()
        if number == 1:
            reform.asked_to_give = (1,)
        first.step([x])
    raise AssertionError


@pytest.mark.parametrize("epochs", [0, 2])
def test_a_joiner_has_the_others_model_optimizer_schedule_and_place(tmp_path: Path, epochs: int) -> None:
    first, under_way = given_state(tmp_path / "state", epochs=epochs)
    wanted = {name: value.clone() for name, value in first.model.state_dict().items()}
    giving = first.session._survivor._giving
    giving.end()
    assert giving.to == (1,)
    reform = ByFile(tmp_path / "state", joins=True, epoch=epochs)
    joiner = script(reform, rank=1)
    for _ in range(epochs):  # which the others have behind them
        assert list(joiner.loader) == []
    batch = next(iter(joiner.loader))
    assert batch[0].tolist() == under_way[:1]  # another's, which counts nothing
    torch.testing.assert_close(wanted, joiner.model.state_dict(), rtol=0, atol=0)
    theirs, own = (each.optimizer.state_dict() for each in (first, joiner))
    assert own["param_groups"] == theirs["param_groups"]
    for index, state in theirs["state"].items():
        assert all(torch.equal(own["state"][index][name], value) for name, value in state.items())
    assert joiner.scheduler.state_dict() == first.scheduler.state_dict()
    assert joiner.session.run.iteration == first.session.run.iteration == 6 * epochs + 2
    dealt = joiner.session._survivor._data
    assert [list(part) for part in dealt.under_way[0].parts] == [under_way, []]
    assert (dealt.weight(), [member.applied for member in reform.members]) == (0.0, [6 * epochs + 2])


def test_a_joiner_lays_out_no_pass_that_others_have_behind_them(monkeypatch, tmp_path: Path) -> None:
    first, _ = given_state(tmp_path / "state", epochs=4)
    first.session._survivor._giving.end()
    laid_out, groups = [], Orders.groups
    monkeypatch.setattr(Orders, "groups", lambda self, epoch: laid_out.append(epoch) or groups(self, epoch))
    joiner = script(ByFile(tmp_path / "state", joins=True, epoch=4), rank=1)
    for _ in range(4):
        assert list(joiner.loader) == []
    next(iter(joiner.loader))
    assert laid_out == [0, 4]  # of the first one, it does not know yet


@dataclass
class HandedOn(ByFile):
    """The others are a step further, at first."""

    frames: tuple[bytes, ...] = ()

    def __call__(self, member: Member, last_result) -> Formed:
        frames, self.frames = self.frames, ()
        if frames:
            raise ResultHandedOn(frames)
        return super().__call__(member, last_result)


@pytest.mark.parametrize("strategy", ["all-reduce", "local-sgd", "diloco"])
def test_who_is_handed_a_result_applies_it_and_not_its_own(monkeypatch, tmp_path: Path, strategy: str) -> None:
    """Over messages one may have a step's result that another has missed, since a third has died."""
    monkeypatch.setattr(AloneCollective, "completes_alike", False)
    ahead = script(ByFile(tmp_path), rank=0, strategy=strategy)
    _, x = next(iter(ahead.loader))
    ahead.step([3 * x + 1])
    reform = HandedOn(tmp_path, frames=tuple(bytes(frame) for frame in ahead.session._survivor.last_result()))
    behind = script(reform, rank=0, strategy=strategy)
    synchronizer = behind.session.run.prepared.synchronizer
    if strategy == "all-reduce":
        synchronizer._gradients.repeating.lost = PeerLost("rank 1 is lost")
    else:
        synchronizer._is_apart = True
    batches = iter(behind.loader)
    behind.step([next(batches)[1]])
    for own, theirs in zip(behind.model.parameters(), ahead.model.parameters(), strict=True):
        assert torch.equal(own, theirs)
    assert (reform.frames, reform.members, behind.session.run.iteration) == ((), (), 1)
    behind.step([next(batches)[1]])  # it regroups before that
    assert [member.applied for member in reform.members] == [1]


def test_who_has_all_messages_mixes_on_others_word(monkeypatch, tmp_path: Path) -> None:
    """Under gossip the others' result is that all have their messages, and how many steps they have made: this
    worker's local step stays."""
    monkeypatch.setattr(AloneCollective, "completes_alike", False)
    ahead, lone = (script(ByFile(tmp_path), rank=0, strategy="gossip") for _ in range(2))
    _, x = next(iter(ahead.loader))
    ahead.step([3 * x + 1])
    reform = HandedOn(tmp_path, frames=tuple(bytes(frame) for frame in ahead.session._survivor.last_result()))
    behind = script(reform, rank=0, strategy="gossip")
    behind.session.run.prepared.synchronizer._is_apart = True
    batches, others = iter(behind.loader), iter(lone.loader)
    for wanted in ([], [1]):  # it regroups before the second
        behind.step([next(batches)[1]])
        lone.step([next(others)[1]])
        for own, theirs in zip(behind.model.parameters(), lone.model.parameters(), strict=True):
            assert torch.equal(own, theirs)
        assert [member.applied for member in reform.members] == wanted
    assert (reform.frames, behind.session.run.iteration) == ((), 2)


@pytest.mark.parametrize(("others_met", "meetings"), [(1, 2), (2, 1)])
def test_a_meeting_that_others_have_left_is_not_met_anew(monkeypatch, others_met: int, meetings: int) -> None:
    """Somebody dies when all have all of it: whoever has not heard that goes on if others have, or all meet again."""
    context = SimpleNamespace(rank=0, membership=Membership.first(3))
    survivor = Survivor(SimpleNamespace(context=context), Elastic(at_least=1, at_most=3))
    survivor._member = replace(survivor._member, met=1)
    met, parts = [], iter([PeerLost("rank 1 is lost"), None])

    def part() -> None:
        said = next(parts)
        if said is not None:
            raise said

    def regroup() -> None:
        survivor._member = replace(survivor._member, membership=Membership(2, (0, 2)), met=others_met)

    monkeypatch.setattr(survivor, "regroup", regroup)
    synchronizer = SimpleNamespace(rejoin=lambda context: None)
    assert survivor.repeated(lambda: met.append(1) or len(met), part, synchronizer) == meetings
    assert (len(met), survivor._member.met) == (meetings, 2)


def test_a_joiner_with_another_model_is_refused(tmp_path: Path) -> None:
    first, _ = given_state(tmp_path / "state", epochs=0)
    first.session._survivor._giving.end()
    joiner = script(ByFile(tmp_path / "state", joins=True), rank=1, features=3)
    with pytest.raises(UsageError, match="the checkpoint is of another model"):
        next(iter(joiner.loader))


def test_a_joiner_that_never_asks_for_a_batch_ends_alone(tmp_path: Path) -> None:
    """It neither evaluates nor saves, as the only worker of a run would."""
    joiner = script(ByFile(tmp_path / "state", joins=True), rank=1)
    joiner.session.set_evaluation(lambda model: pytest.fail("it was evaluated"))
    joiner.session.finish()
    joiner.session.release()


def test_who_is_asked_to_leave_does_so_between_two_steps(tmp_path: Path) -> None:
    reform = ByFile(tmp_path / "state")
    first = script(reform, rank=0)
    batches = iter(first.loader)
    _, x = next(batches)
    reform.is_asked_to_leave = True
    first.step([x])
    with pytest.raises(BudgetReached, match="this worker leaves the run"):
        next(batches)
    assert reform.has_left
    first.session.finish()
    assert first.session.run.iteration == 1
