"""A round's sum by secure aggregation: rank 0 has the server's end, and each worker those of the clients it played."""

import random
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from paceline.aggregate import Contribution
from paceline.comm.base import Collective
from paceline.comm.objects import decode_object, encode_object
from paceline.errors import UsageError
from paceline.pieces import Piece
from paceline.seeding import derive
from paceline.strategies.elsewhere import Total

LEAST_CLIENTS = 3
"""A sum is of no fewer clients: of two each knows the other's part."""
_NUM_STAGES = 4


@final
@dataclass(frozen=True)
class Masks(Piece, name="masks"):
    """The server learns the sum of changes alone, under masks that cancel out in it (Bonawitz et al., CCS 2017), shared
    with `neighbours` others each (SecAgg+: Bell et al., CCS 2020), or with all of the round.

    Elements of changes are rounded to even levels within `clip`. Of a client and its neighbours the part `threshold`
    has to stay until the end. For studies, a client drops out with the probability `lost`, at a stage that is drawn.
    """

    clip: float = 1.0
    neighbours: int | None = None
    threshold: float = 0.67
    lost: float = 0.0

    def __post_init__(self) -> None:
        if not self.clip > 0 or not 0.5 < self.threshold <= 1 or not 0 <= self.lost < 1:
            raise ValueError("clip must be above 0, threshold above 0.5 and at most 1, and lost at least 0 and below 1")
        if self.neighbours is not None and (self.neighbours < 2 or self.neighbours % 2):
            raise ValueError(f"neighbours must be an even number, at least 2, not {self.neighbours}")


@final
class SecureSum:
    """
    Args:
        num_elements: of a vector.

    Raises:
        UsageError: the package that encrypts is not installed.
    """

    def __init__(self, masks: Masks, collective: Collective, *, num_elements: int, seed: int) -> None:
        try:
            import paceline.secure  # noqa: F401 - not every installation has it
        except ImportError:
            raise UsageError("secure=masks needs the package cryptography: pip install paceline[secure]") from None
        self._masks, self._collective, self._num_elements, self._seed = masks, collective, num_elements, seed

    def total(self, vectors: Mapping[int, tuple[float, Tensor]], *, round_number: int) -> Total:
        """The sum over all workers' clients, each with a weight and a vector of its own. None is summed if they are too
        few to hide among one another. Collective call.

        Raises:
            UsageError: too many have dropped out, on all workers.
        """
        heads = self._collective.all_gather_object([(client, weight) for client, (weight, _) in vectors.items()])
        weights = {client: weight for own in heads for client, weight in own}
        if len(weights) < LEAST_CLIENTS:
            return Total(torch.zeros(self._num_elements, dtype=torch.float64), 0.0, 0)
        largest = max(weights.values())
        scaled = {client: vector.double() * (weight / largest) for client, (weight, vector) in vectors.items()}
        players = {client: rank for rank, own in enumerate(heads) for client, _ in own}
        found = _Round(self._masks, self._collective, players, self._num_elements, self._seed, round_number)
        total, arrived = found.run(scaled)
        return Total(total * largest, sum(weights[client] for client in arrived), len(arrived))


@final
class _Round:
    """The four stages of one."""

    def __init__(
        self,
        masks: Masks,
        collective: Collective,
        players: Mapping[int, int],
        num_elements: int,
        seed: int,
        round_number: int,
    ) -> None:
        from paceline.secure import Quantiser, Server, parties

        self._collective, self._players, self._number = collective, players, round_number
        clients = sorted(players)
        self._graph, self._threshold = parties(
            clients,
            num_neighbours=masks.neighbours,
            part=masks.threshold,
            least=LEAST_CLIENTS,
            seed=derive(seed, "secure", "graph", round_number),
        )
        self._label = f"{seed} {round_number}"
        draws = random.Random(derive(seed, "secure", "lost", round_number))
        self._gone_at = {u: draws.randrange(_NUM_STAGES) if draws.random() < masks.lost else None for u in clients}
        self._quantiser = Quantiser(masks.clip, len(clients))
        self._server = Server(self._graph, threshold=self._threshold, num_elements=num_elements)  # rank 0's is fed

    def run(self, vectors: Mapping[int, Tensor]) -> tuple[Tensor, list[int]]:
        """The sum, and whose vectors it is of."""
        from paceline.secure import Client, PublicKeys, Revealed

        ends = {u: Client(u, neighbours=self._graph[u], threshold=self._threshold, label=self._label) for u in vectors}
        server, encode = self._server, self._quantiser.encode
        keys = self._stage(
            0,
            ends,
            lambda u: tuple(ends[u].advertise()),
            lambda u, own: server.receive_keys(u, PublicKeys(*own)),
            lambda: {u: {v: tuple(each) for v, each in near.items()} for u, near in server.keys_for().items()},
        )
        shares = self._stage(
            1,
            keys,
            lambda u: ends[u].share({v: PublicKeys(*each) for v, each in keys[u].items()}),
            server.receive_shares,
            server.shares_for,
        )
        arrived = self._stage(
            2,
            shares,
            lambda u: ends[u].mask(encode(vectors[u]), shares[u]).tobytes(),
            lambda u, raw: server.receive_vector(u, np.frombuffer(raw, dtype=np.uint32)),
            server.arrived_for,
        )
        self._stage(
            3,
            arrived,
            lambda u: _plain(ends[u].unmask(arrived[u])),
            lambda u, secrets: server.receive_revealed(u, Revealed(*secrets)),
            dict,
        )
        found = None
        if self._collective.rank == 0:
            found = _or_text(lambda: (self._quantiser.decode(server.total(), num_summed=len(server.arrived)),))
            found = found if isinstance(found, str) else (found[0], list(server.arrived))
        total, of_whom = self._said(self._collective.broadcast_object(found))
        return total, of_whom

    def _stage(
        self,
        number: int,
        clients: Collection[int],
        compose: Callable[[int], Any],
        receive: Callable[[int, Any], None],
        end: Callable[[], Mapping[int, Any]],
    ) -> dict[int, Any]:
        """This worker's clients send, the server receives and ends the stage; what it answers them.

        A client whom the protocol forbids to go on sends nothing, as one that has gone."""
        composed = [(u, _or_text(partial(compose, u))) for u in clients if self._stays(u, number)]
        gathered = self._collective.gather_object([each for each in composed if not isinstance(each[1], str)])
        parts = None
        if gathered is not None:
            for u, content in (each for own in gathered for each in own):
                _or_text(partial(receive, u, content))
            parts = self._parts(_or_text(end))
        return dict(self._said(decode_object(self._collective.scatter(parts))))

    def _stays(self, client: int, stage: int) -> bool:
        gone_at = self._gone_at[client]
        return gone_at is None or gone_at > stage

    def _parts(self, answers: Any) -> list[Tensor]:
        """What each worker is to be told: its clients' answers, or all why there are none."""
        if isinstance(answers, str):
            return [encode_object(answers)] * self._collective.size
        each: list[dict[int, Any]] = [{} for _ in range(self._collective.size)]
        for client, answer in answers.items():
            each[self._players[client]][client] = answer
        return [encode_object(part) for part in each]

    def _said(self, found: Any) -> Any:
        """What the server has said, unless that is why the round is over."""
        if isinstance(found, str):
            raise UsageError(
                f"round {self._number}: secure=masks gives no sum: {found}; draw more clients (fraction), or lower "
                "secure.threshold"
            )
        return found


def _or_text(work: Callable[[], Any]) -> Any:
    """What it returns, or why the protocol refuses it."""
    from paceline.secure import SecureError

    try:
        return work()
    except SecureError as error:
        return str(error)


def _plain(revealed: Any) -> tuple[dict[int, bytes], dict[int, bytes]]:
    return dict(revealed.seeds), dict(revealed.keys)


def flat(contribution: Contribution, num_tensors: int) -> Tensor:
    """A contribution's first tensors as one."""
    return torch.cat([tensor.reshape(-1).double() for tensor in contribution.gradients[:num_tensors]])
