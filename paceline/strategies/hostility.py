"""The attacks that a study asks for: what hostile workers and clients send, and what they are told."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, final

import torch
from torch import Tensor

from paceline.aggregate import Contribution
from paceline.attacks import Attack, SentAttack, parse, require_possible
from paceline.comm.base import Collective
from paceline.errors import UsageError
from paceline.seeding import derive
from paceline.strategies.base import Context
from paceline.strategies.exchange import Messages
from paceline.strategies.traits import Traits


@final
class HostileWorkers:
    """What hostile workers send, as `Hostility`. They are so for as long as they are there, and who joins is honest.

    Args:
        num_named: workers of which each attack's are the last.
        knows_all: hostile workers are told what honest ones are about to send, so that `corrupt` is a collective call.
        seed: the run's.
    """

    def __init__(self, attacks: Sequence[Attack], *, num_named: int, knows_all: bool, seed: int) -> None:
        self._attacks = [attack for attack in attacks if isinstance(attack, SentAttack)]
        self._all, self._num_named, self._seed = tuple(attacks), num_named, seed
        self._tells = knows_all and any(attack.least_known > 0 for attack in self._attacks)

    def corrupt(self, tensors: Sequence[Tensor], step: int, *, context: Context, weights: Sequence[float]) -> None:
        """As `Hostility.corrupt`. Where fewer honest workers have samples than an attack has to know, it is not made.

        A joiner has no samples in its first exchange, nor has a worker for which none are left: it is about to send
        nothing, and does not attack.
        """
        place, ranks = context.collective.rank, context.membership.ranks
        has_samples = [weight > 0 for weight in weights] or [True] * len(ranks)
        is_hostile = [self._is_hostile(self._all, rank) and has for rank, has in zip(ranks, has_samples, strict=True)]
        is_honest = [has and not hostile for has, hostile in zip(has_samples, is_hostile, strict=True)]
        own = torch.cat([_flat(tensor) for tensor in tensors])
        honest = _told(own, context.collective, is_hostile, is_honest) if self._tells else own[None]
        attacks = [each for each in self._attacks if self._is_hostile([each], context.rank) and is_hostile[place]]
        # An update may take several rounds where workers come and go, and one round is repeated when somebody dies.
        rounds = () if context.recovery is None else (context.recovery.num_dealt,)
        generator = torch.Generator().manual_seed(derive(self._seed, "attack", context.rank, step, *rounds))
        for attack in attacks:
            if len(honest) >= attack.least_known:
                there = replace(attack, workers=sum(self._is_hostile([attack], rank) for rank in ranks))
                own = there.sent(own, honest, size=len(ranks), generator=generator)
        if attacks:
            for tensor, part in zip(tensors, own.split([tensor.numel() for tensor in tensors]), strict=True):
                tensor.copy_(part.view(tensor.shape))

    def _is_hostile(self, attacks: Sequence[Attack], rank: int) -> bool:
        return any(attack.is_hostile(rank, size=self._num_named) for attack in attacks)


def _told(own: Tensor, collective: Collective, is_hostile: Sequence[bool], is_honest: Sequence[bool]) -> Tensor:
    """What honest workers send, one a row, if this worker is hostile. Collective call.

    Args:
        is_hostile: of each worker, whether it is told.
        is_honest: and whether it tells.
    """
    rank, raw = collective.rank, own.view(torch.uint8)
    outgoing = [raw if is_honest[rank] and each else raw[:0] for each in is_hostile]
    sizes = [len(raw) if is_hostile[rank] and each else 0 for each in is_honest]
    given = [each for each in Messages(collective).start_all_to_all(outgoing, sizes)() if each.numel()]
    return torch.stack([each.clone().view(own.dtype) for each in given]) if given else own[:0].view(0, 0)


@final
class HostileClients:
    """What a round's hostile clients send. Every worker has all contributions, and works it out alike.

    In a round with fewer honest clients than an attack has to know, hostile ones go by what they have computed
    themselves, as honest clients would; with too few of these as well, they send that.
    """

    def __init__(self, attacks: Sequence[Attack], *, num_clients: int, seed: int) -> None:
        self._attacks = [attack for attack in attacks if isinstance(attack, SentAttack)]
        self._all, self._num_clients, self._seed = tuple(attacks), num_clients, seed

    def corrupt(self, contributions: Sequence[Contribution], round_number: int) -> list[Contribution]:
        """What is sent in the place of these; they stay as they are."""
        rows = [torch.cat([_flat(tensor) for tensor in each.gradients]) for each in contributions]
        computed = torch.stack(rows)
        is_honest = torch.tensor([not self._is_hostile(self._all, each.sender) for each in contributions])
        for attack in self._attacks:
            least = max(1, attack.least_known)
            known = computed[is_honest] if int(is_honest.sum()) >= least else computed
            hostile = [index for index, each in enumerate(contributions) if self._is_hostile([attack], each.sender)]
            if not hostile or len(known) < least:
                continue
            there = replace(attack, workers=len(hostile))
            for index in hostile:
                generator = self._generator(contributions[index], round_number)
                rows[index] = there.sent(rows[index], known, size=len(rows), generator=generator)
        return [
            each if honest else each._replace(kind="gradient", tensors=_like(each.tensors, row))
            for each, row, honest in zip(contributions, rows, is_honest.tolist(), strict=True)
        ]

    def _is_hostile(self, attacks: Sequence[Attack], client: int) -> bool:
        return any(attack.is_hostile(client, size=self._num_clients) for attack in attacks)

    def _generator(self, each: Contribution, round_number: int) -> torch.Generator:
        return torch.Generator().manual_seed(derive(self._seed, "attack", each.sender, round_number))


def require_attackable(attacks: Sequence[Attack], traits: Traits, *, num_workers: int) -> None:
    """Raises UsageError where there can be no such attack under a strategy of these traits."""
    if attacks and not traits.passes_attacks:
        raise UsageError(
            f"--attack {attacks[0]} has no effect under this strategy, whose workers cannot be made hostile; try "
            "all-reduce, ps-bsp, local-sgd, gossip or fed-avg"
        )
    if traits.num_clients:
        require_possible(attacks, num_senders=traits.num_clients, knows_all=True, kind="client")
    else:
        require_possible(attacks, num_senders=num_workers, knows_all=traits.takes_equal_steps)


def under_attack(attacks: Sequence[Attack], context: Context, traits: Traits) -> Context:
    """The context of a worker that is hostile, or tells those who are what they are to know. Raises UsageError as
    `require_attackable`."""
    require_attackable(attacks, traits, num_workers=context.num_named)
    if not any(isinstance(attack, SentAttack) for attack in attacks):
        return context
    if traits.num_clients:
        clients = HostileClients(attacks, num_clients=traits.num_clients, seed=context.seed)
        return replace(context, corrupt_clients=clients.corrupt)
    knows_all = traits.takes_equal_steps
    hostility = HostileWorkers(attacks, num_named=context.num_named, knows_all=knows_all, seed=context.seed)
    return replace(context, hostility=hostility)


def told_of(texts: Sequence[str], context: Context, traits: Traits) -> dict[str, Any]:
    """What is recorded of a run's attacks; where workers come and go, who is hostile."""
    knows = "all" if traits.takes_equal_steps else "own"
    told: dict[str, Any] = {"attacks": list(texts), "hostile workers know": knows}
    if context.reform is None or traits.num_clients:
        return told
    attacks, size = parse(texts), context.num_named
    hostile = [rank for rank in range(size) if any(each.is_hostile(rank, size=size) for each in attacks)]
    return told | {"hostile workers": hostile, "who joins": "honest"}


def _like(tensors: Sequence[Tensor], row: Tensor) -> list[Tensor]:
    """The row in tensors of these shapes."""
    parts = row.split([tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape).to(tensor) for tensor, part in zip(tensors, parts, strict=True)]


def _flat(tensor: Tensor) -> Tensor:
    if tensor.dtype.is_complex:
        raise UsageError("--attack knows real parameters alone, and some of this model's are complex")
    return tensor.detach().reshape(-1).to("cpu", torch.float64)
