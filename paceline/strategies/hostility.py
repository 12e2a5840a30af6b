"""The attacks that a study asks for: what hostile workers and clients send, and what they are told."""

from collections.abc import Sequence
from dataclasses import replace
from typing import final

import torch
from torch import Tensor

from paceline.aggregate import Contribution
from paceline.attacks import Attack, SentAttack, require_possible
from paceline.comm.base import Collective
from paceline.errors import UsageError
from paceline.seeding import derive
from paceline.strategies.base import Context
from paceline.strategies.exchange import Messages
from paceline.strategies.traits import Traits


@final
class Hostility:
    """
    Args:
        knows_all: hostile workers are told what honest ones are about to send, so that `corrupt` is a collective call.
        seed: the run's.
    """

    def __init__(self, attacks: Sequence[Attack], collective: Collective, *, knows_all: bool, seed: int) -> None:
        self._collective, self._seed = collective, seed
        rank, size = collective.rank, collective.size
        sent = [attack for attack in attacks if isinstance(attack, SentAttack)]
        self._own = [attack for attack in sent if attack.is_hostile(rank, size=size)]
        self._is_hostile = [any(attack.is_hostile(each, size=size) for attack in attacks) for each in range(size)]
        self._tells = knows_all and any(attack.least_known > 0 for attack in sent)

    def corrupt(self, tensors: Sequence[Tensor], step: int) -> None:
        """What this worker is about to send becomes what its attacks make of it, in place.

        Args:
            step: the same on all workers.
        """
        own = torch.cat([_flat(tensor) for tensor in tensors])
        honest = self._told(own) if self._tells else own[None]
        generator = torch.Generator().manual_seed(derive(self._seed, "attack", self._collective.rank, step))
        for attack in self._own:
            own = attack.sent(own, honest, size=self._collective.size, generator=generator)
        if self._own:
            for tensor, part in zip(tensors, own.split([tensor.numel() for tensor in tensors]), strict=True):
                tensor.copy_(part.view(tensor.shape))

    def _told(self, own: Tensor) -> Tensor:
        """What honest workers send, one a row; `own` as the only row where this worker is honest."""
        rank, raw = self._collective.rank, own.view(torch.uint8)
        nothing = raw[:0]
        outgoing = [raw if is_hostile and not self._is_hostile[rank] else nothing for is_hostile in self._is_hostile]
        sizes = [len(raw) if self._is_hostile[rank] and not is_hostile else 0 for is_hostile in self._is_hostile]
        given = [each for each in Messages(self._collective).start_all_to_all(outgoing, sizes)() if each.numel()]
        return torch.stack([each.clone().view(own.dtype) for each in given]) if self._is_hostile[rank] else own[None]


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
            for index, each in enumerate(contributions):
                if self._is_hostile([attack], each.sender) and len(known) >= least:
                    rows[index] = attack.sent(
                        rows[index], known, size=self._num_clients, generator=self._generator(each, round_number)
                    )
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
    require_attackable(attacks, traits, num_workers=context.size)
    if not any(isinstance(attack, SentAttack) for attack in attacks):
        return context
    if traits.num_clients:
        clients = HostileClients(attacks, num_clients=traits.num_clients, seed=context.seed)
        return replace(context, corrupt_clients=clients.corrupt)
    hostility = Hostility(attacks, context.collective, knows_all=traits.takes_equal_steps, seed=context.seed)
    return replace(context, corrupt=hostility.corrupt)


def _like(tensors: Sequence[Tensor], row: Tensor) -> list[Tensor]:
    """The row in tensors of these shapes."""
    parts = row.split([tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape).to(tensor) for tensor, part in zip(tensors, parts, strict=True)]


def _flat(tensor: Tensor) -> Tensor:
    if tensor.dtype.is_complex:
        raise UsageError("--attack knows real parameters alone, and some of this model's are complex")
    return tensor.detach().reshape(-1).to("cpu", torch.float64)
