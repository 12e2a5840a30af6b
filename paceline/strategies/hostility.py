"""A worker's part in the attacks that a study asks for: what it sends if it is hostile, and tells those who are."""

from collections.abc import Sequence
from dataclasses import replace
from typing import final

import torch
from torch import Tensor

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
        given = [each for each in Messages(self._collective).all_to_all(outgoing, sizes) if each.numel()]
        return torch.stack([each.clone().view(own.dtype) for each in given]) if self._is_hostile[rank] else own[None]


def under_attack(attacks: Sequence[Attack], context: Context, traits: Traits) -> Context:
    """The context of a worker that is hostile, or tells those who are what they are to know. Raises UsageError where
    there can be no such attack."""
    knows_all = traits.takes_equal_steps
    require_possible(attacks, num_workers=context.size, knows_all=knows_all)
    if not any(isinstance(attack, SentAttack) for attack in attacks):
        return context
    hostility = Hostility(attacks, context.collective, knows_all=knows_all, seed=context.seed)
    return replace(context, corrupt=hostility.corrupt)


def _flat(tensor: Tensor) -> Tensor:
    if tensor.dtype.is_complex:
        raise UsageError("--attack knows real parameters alone, and some of this model's are complex")
    return tensor.detach().reshape(-1).to("cpu", torch.float64)
