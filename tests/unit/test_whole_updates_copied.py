"""Workers and servers die, and workers join, between any two messages, where updates of whole global batches take
several rounds and servers have copies: all copies make the same updates, each of all its samples."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.server.spec import Push
from tests.covering import in_turns
from tests.unit.outlived_copies import (
    NUM_WORKERS,
    PLACES,
    POINTS,
    WITH_A_SERVER,
    Asking,
    Net,
    Restored,
    Training,
)
from tests.unit.replicated_servers import DEATHS, FOREVER, TWO_DEATHS, Death
from tests.unit.test_whole_updates import VALUES, Worker, batches


class Pushing:
    """What a worker's `push` is given, in the place of a net."""

    def __init__(self, net: Net) -> None:
        self.net = net

    def push(self, worker: int, value: float, **push: object) -> None:
        self.net.push(worker, value, Push(pause_at=FOREVER, **push))


class WholeTraining(Training):
    """Each worker takes its steps until its data are at their end."""

    def __init__(self, net: Net, *, dead: int | None, lives_on: bool) -> None:
        super().__init__(net, dead=dead, lives_on=lives_on)
        self.groups = batches(NUM_WORKERS)[:4]
        self.workers = {rank: Worker(rank, self.groups) for rank in range(NUM_WORKERS)}
        self.given: Worker | None = None

    def letting_in(self) -> Asking:
        giver = next(rank for rank in sorted(self.acting) if rank != self.dead)
        self.given = self.workers[giver].as_it_is()
        yield from super().letting_in()

    def go_on(self) -> None:
        for worker in list(self.acting):
            client, asked = self.net.clients[worker], self.asked[worker]
            if asked == "left" or (asked and not self.net.is_idle(worker)):
                continue
            if asked:
                client.require_done()
            if asked == "leave":
                self.asked[worker] = "left"
                continue
            if asked:
                reply = client.reply()
                assert reply.admitted
                if asked == "push":
                    self.workers[worker].ended(reply.took[-1].workers)
                else:
                    assert self.given is not None
                    self.workers[worker] = Worker(worker, self.groups)
                    self.workers[worker].enter(self.given, clock=reply.clock, took=reply.took)
            if self.workers[worker].begins():
                self.asked[worker] = "push"
                self.workers[worker].push(Pushing(self.net))
            else:
                self.asked[worker] = "leave"
                self.net.ask(worker, client.leave())


def require_whole_batches(
    places: str,
    deaths: Sequence[Death],
    *,
    replicas: int,
    seed: int,
    dies_after: int | None,
    joins_after: int | None = None,
    lives_on: bool = False,
    kind: type[Net] = Net,
) -> None:
    net = kind("bsp", PLACES[places], replicas=replicas, deaths=deaths, seed=seed)
    training = WholeTraining(net, dead=None if dies_after is None else seed % NUM_WORKERS, lives_on=lives_on)
    training.run(dies_after=dies_after, joins_after=joins_after)
    wanted = -sum(
        sum(VALUES[sample] for part in group for sample in part) / sum(map(len, group)) for group in training.groups
    )
    found = torch.cat([tensor.double().reshape(-1) for tensors in net.heads_parameters() for tensor in tensors])
    assert found[found != 0].tolist() == pytest.approx([wanted] * int((found != 0).sum()), rel=1e-5)
    assert int((found != 0).sum()) >= 101
    net.assert_copies_are_equal()


@settings(max_examples=60, deadline=None)
@given(
    places=st.sampled_from(sorted(PLACES)),
    death=DEATHS,
    seed=st.integers(0, 2**32),
    dies_after=POINTS,
    joins_after=st.none() | POINTS,
    lives_on=st.booleans(),
)
def test_a_worker_and_a_server_die(
    places: str, death: Death, seed: int, dies_after: int, joins_after: int | None, lives_on: bool
) -> None:
    about = {"dies_after": dies_after, "joins_after": joins_after, "lives_on": lives_on}
    require_whole_batches(places, [death], replicas=1, seed=seed, **about)


@settings(max_examples=30, deadline=None)
@given(
    places=st.sampled_from(sorted(PLACES)),
    deaths=TWO_DEATHS,
    seed=st.integers(0, 2**32),
    dies_after=st.none() | POINTS,
    joins_after=POINTS,
)
def test_a_worker_joins_and_two_servers_die(
    places: str, deaths: list[Death], seed: int, dies_after: int | None, joins_after: int
) -> None:
    require_whole_batches(places, deaths, replicas=2, seed=seed, dies_after=dies_after, joins_after=joins_after)


@settings(max_examples=30, deadline=None)
@given(
    places=st.sampled_from(sorted(PLACES)),
    deaths=TWO_DEATHS,
    seed=st.integers(0, 2**32),
    dies_after=st.none() | POINTS,
    joins_after=st.none() | POINTS,
)
def test_copies_are_made_anew(
    places: str, deaths: list[Death], seed: int, dies_after: int | None, joins_after: int | None
) -> None:
    """Between two updates, since the rounds of one that is open are not given again."""
    about = {"dies_after": dies_after, "joins_after": joins_after, "kind": Restored}
    require_whole_batches(places, deaths, replicas=1, seed=seed, **about)


@pytest.mark.parametrize(("victim", "places"), in_turns(sorted(PLACES), (0, 1, 2)))
def test_a_worker_dies_with_a_server_after_any_of_its_messages(places: str, victim: int) -> None:
    for num_sent in range(1, 60):
        death = Death(victim, num_sent, num_lost=num_sent // 3 % 3)
        require_whole_batches(places, [death], replicas=1, seed=num_sent, dies_after=WITH_A_SERVER)
