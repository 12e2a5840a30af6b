"""Clients' turns while workers come and go: each is played once by somebody who is there when the round ends."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from paceline.comm.alone import AloneCollective
from paceline.errors import PeerLost
from paceline.membership import Membership
from paceline.messages import Raw
from paceline.partition import IID
from paceline.roster import Participation, Poisson, Roster, Sampler, Turn, Uniform
from paceline.strategies import build
from paceline.strategies.base import Context
from paceline.strategies.regrouping import ResultHandedOn
from tests.unit.federated_rounds import Player

SIZES = tuple(range(1, 31))


def roster_of(rank: int, ranks: Sequence[int], sampler: Sampler | None = None, fraction: float = 0.4) -> Roster:
    participation = Participation(
        num_clients=30, fraction=fraction, partition=IID(), sampler=sampler or Uniform(), epochs=1, is_settled=False
    )
    return Roster(participation, sizes=SIZES, num_batches=SIZES, rank=rank, ranks=ranks, seed=3)


def test_a_worker_that_never_has_a_turn_is_told_of_the_largest_client() -> None:
    """So that `len(loader)` has an end, wherever it is asked for."""
    participation = Participation(
        num_clients=2, fraction=1.0, partition=IID(), sampler=Uniform(), epochs=1, is_settled=False
    )
    rosters = [
        Roster(participation, sizes=(3, 5), num_batches=(3, 5), rank=rank, ranks=range(4), seed=0) for rank in range(4)
    ]
    assert sorted(roster.batches_of(0) for roster in rosters) == [3, 5, 5, 5]


class Players:
    """Workers that play their turns by the number of their passes, as scripts do."""

    def __init__(self, size: int, sampler: Sampler) -> None:
        self.membership, self.sampler = Membership.first(size), sampler
        self.rosters = {rank: roster_of(rank, range(size), sampler) for rank in range(size)}
        self.passes = dict.fromkeys(range(size), 0)
        self.number = 0
        self.played: dict[int, list[Turn]] = {rank: [] for rank in range(size)}  # of the round

    def play(self, rank: int, most: int) -> None:
        """This worker plays so many of the turns that it has left in the round, at most."""
        for turn in self.rosters[rank].of_round(self.number)[len(self.played[rank]) :][:most]:
            assert self.rosters[rank].turn(self.passes[rank]) == turn
            self.passes[rank] += 1
            self.played[rank].append(turn)

    def change(self, gone: Sequence[int], comes: Sequence[int], *, misses: Sequence[int] = ()) -> None:
        """Those who are left meet, and some lose sight of one another before they have dealt turns anew."""
        for rank in gone:
            del self.rosters[rank], self.passes[rank], self.played[rank]
        for rank in comes:
            giver = min(self.rosters)
            roster = roster_of(rank, [rank], self.sampler)
            roster.take_up(self.rosters[giver].word(self.number), self.number, num_turns=self.passes[giver])
            self.rosters[rank], self.passes[rank], self.played[rank] = roster, self.passes[giver], []
        self.membership = Membership(self.membership.epoch + 1, tuple(sorted(self.rosters)))
        words = [roster.word(self.number) for _, roster in sorted(self.rosters.items())]
        for rank in set(self.rosters) - set(misses):
            self.rosters[rank].deal_anew(self.number, self.membership, words)

    def end_round(self) -> None:
        turns = [turn for played in self.played.values() for turn in played]
        assert sorted(turns) == sorted(roster_of(0, [0], self.sampler).of_round(self.number))
        self.number, self.played = self.number + 1, {rank: [] for rank in self.rosters}


@pytest.mark.parametrize("sampler", [Uniform(), Poisson()], ids=str)
@pytest.mark.parametrize("seed", range(25))
def test_each_turn_is_played_once_by_who_is_there_at_the_end(sampler: Sampler, seed: int) -> None:
    """Deaths and joins at drawn places of rounds, several in one round, and some after which a part of the workers has
    missed how turns were dealt, and meets the others again."""
    draws, players = random.Random(seed), Players(4, sampler)
    next_rank = 4
    for _ in range(12):
        for rank in players.rosters:
            players.play(rank, most=draws.choice([0, 1, 99]))
        for _ in range(draws.choice([0, 0, 1, 2])):
            everyone = sorted(players.rosters)
            gone = draws.sample(everyone, draws.randint(0, len(everyone) - 1))
            comes = list(range(next_rank, next_rank + draws.choice([0, 0, 1, 2])))
            next_rank += len(comes)
            for rank in everyone:  # all who are left have come to the end of their turns
                if rank not in gone:
                    players.play(rank, most=99)
            left = [rank for rank in everyone if rank not in gone]
            misses = draws.sample(left, draws.randint(0, len(left) - 1))
            players.change(gone, comes, misses=misses)
            if misses:
                for rank in set(left) - set(misses):  # plays what it was dealt, and finds that others are not there
                    players.play(rank, most=99)
                players.change(draws.sample(sorted(players.rosters), draws.randint(0, len(players.rosters) - 1)), [])
        for rank in players.rosters:
            players.play(rank, most=99)
        players.end_round()


def test_who_comes_has_turns_of_the_next_round() -> None:
    players = Players(2, Uniform())
    for rank in (0, 1):
        players.play(rank, most=99)
    players.change([], [5])
    assert not players.rosters[5].of_round(0)
    players.end_round()
    turns = {rank: len(roster.of_round(1)) for rank, roster in players.rosters.items()}
    assert sum(turns.values()) == 12
    assert min(turns.values()) >= 3
    assert len({tuple(roster.players(1).items()) for roster in players.rosters.values()}) == 1


class Redealing:
    """What a worker is told whose others are gone: it is left alone, or is handed the round's result."""

    has_given = False
    trained = (7, 2)

    def __init__(self, handed: Sequence[Raw] = ()) -> None:
        self.last_result: Any = tuple
        self.committed: list[tuple[int, int]] = []
        self.context: Context | None = None
        self._handed = handed

    def commit(self, trained: tuple[int, int]) -> None:
        self.committed.append(trained)

    def regroup(self) -> Context:
        if self._handed:
            handed, self._handed = self._handed, ()
            raise ResultHandedOn(handed)
        assert self.context is not None
        return self.context


class Parting(AloneCollective):
    """Of two workers, one of which is gone when they first exchange anything."""

    completes_alike = False

    def __init__(self) -> None:
        super().__init__()
        self.size = 2

    def persistent_all_reduce(self, *_: Any, **__: Any) -> Any:
        def lost() -> None:
            raise PeerLost("worker 1 is gone")

        return lost


class LeftAlone(AloneCollective):
    completes_alike = False


CLIENTS = [(1.0, float(number), 1 + number % 3) for number in range(6)]


def played(collective: AloneCollective, redealing: Redealing, rounds: int, **options: Any) -> Player:
    strategy = build("scaffold", {"clients": 6, "fraction": 0.7, "weights": "samples", **options})
    player = Player(collective, strategy, CLIENTS, redealing=redealing)
    redealing.context = replace(player.context, membership=Membership(2, (0,)), collective=LeftAlone())
    player.go_to(rounds)
    return player


def test_who_is_left_plays_the_turns_of_who_is_gone_and_keeps_its_own() -> None:
    alone, left = Redealing(), Redealing()
    wanted = played(LeftAlone(), alone, 4)
    found = played(Parting(), left, 4)
    assert len(left.committed) == len(alone.committed) == 4
    assert found.parameter() == pytest.approx(wanted.parameter(), rel=1e-12)
    own, theirs = (player.synchronizer.own_state() for player in (found, wanted))
    assert own.keys() == theirs.keys()
    assert {state.fate for state in own.values()} == {"same"}
    for name in own:
        torch.testing.assert_close(own[name].tensor, theirs[name].tensor)


def test_who_has_missed_the_end_of_a_round_takes_up_what_it_came_to() -> None:
    """With what clients keep of it, and of what it was trained, although its own turns are half of the round's."""
    ahead = Redealing()
    wanted = played(LeftAlone(), ahead, 1)
    behind = Redealing(handed=[bytes(frame) for frame in ahead.last_result()])
    found = played(Parting(), behind, 1)
    assert behind.committed == [(7, 2)]
    assert found.parameter() == wanted.parameter()
    own, theirs = (player.synchronizer.own_state() for player in (found, wanted))
    assert own.keys() == theirs.keys()
    assert all(torch.equal(own[name].tensor, theirs[name].tensor) for name in own)
