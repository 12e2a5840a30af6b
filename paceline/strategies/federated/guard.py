"""Differential privacy of a federated run: what hides a client's change, and what rounds have cost."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import final

import torch
from torch import Tensor

from paceline.aggregate import Contribution
from paceline.errors import UsageError
from paceline.privacy import Privacy, adapted_clip
from paceline.roster import Roster
from paceline.seeding import derive
from paceline.strategies.own_state import OwnState
from paceline.transform import AddNoise, ClipNorm, outward

_CLIP, _TERMS = "privacy.clip", "privacy.terms"
_NUM_OLDER = 4
"""Terms in checkpoints of older versions, which lack the sampler."""


@final
class Guard:
    """Clips and hides a round's changes, on every worker alike: noise on the joint is drawn from the run's seed and the
    round.

    Raises:
        UsageError: one round costs more than the run may.
    """

    def __init__(self, privacy: Privacy, roster: Roster, *, seed: int) -> None:
        self._privacy, self._roster, self._seed = privacy, roster, seed
        participation = roster.participation
        self._rate = participation.fraction
        self._num_expected = participation.fraction * participation.num_clients
        self._on_sum = privacy.on_sum(num_expected=self._num_expected)
        self._clip = privacy.clip
        self._turns = Counter[int]()  # each client's, in as many rounds as have been counted
        self._most_turns = [0]  # that any client has had after each round
        if self.is_spent(1):
            raise UsageError(
                f"privacy.epsilon={privacy.epsilon:g} allows no round: one costs {self.epsilon(1):.3g}; add noise, or "
                "have fewer clients take part"
            )

    @property
    def steps_alone(self) -> bool:
        """Whether a round in which nobody took part has its noise, too, so that nobody can tell."""
        return self._on_sum is not None

    def epsilon(self, num_rounds: int) -> float:
        """What so many rounds cost a client."""
        most_turns = self._most_turns_of_any(num_rounds) if self._on_sum is None else 0
        return self._privacy.spent(rounds=num_rounds, most_turns=most_turns, sample_rate=self._rate)

    def _most_turns_of_any(self, num_rounds: int) -> int:
        while len(self._most_turns) <= num_rounds:
            self._turns.update(self._roster.drawn(len(self._most_turns) - 1).keys())
            self._most_turns.append(max(self._turns.values(), default=0))
        return self._most_turns[num_rounds]

    def is_spent(self, num_rounds: int) -> bool:
        """Whether so many rounds cost more than the run may."""
        return self._privacy.epsilon is not None and self.epsilon(num_rounds) > self._privacy.epsilon

    def clipped(self, sent: Contribution) -> Contribution:
        """The server clips what it adds noise to, so that a client that does not clip itself gains nothing."""
        return sent if self._on_sum is None else ClipNorm(self._clip).outward(sent)

    def outward(self, changes: Sequence[Tensor], *, client: int, round_number: int) -> list[Tensor]:
        """What leaves the client: its change, shortened and with its own noise, and at the end whether it was within
        the clip, as 1/2 or -1/2."""
        own = Contribution(client, 1.0, "gradient", list(changes))
        norm = math.sqrt(sum(float(tensor.double().square().sum()) for tensor in changes))
        layers: list[ClipNorm | AddNoise] = [ClipNorm(self._clip)]
        if self._on_sum is None:
            deviation = self._privacy.noise * self._clip
            layers.append(AddNoise(deviation, self._generator("client", round_number, client)))
        within = torch.tensor([0.5 if norm <= self._clip else -0.5], dtype=torch.float64, device=changes[0].device)
        return [*outward(layers, own).tensors, within]

    def inward(self, joined: Sequence[Tensor], *, num_changes: int, num_summed: int, round_number: int) -> list[Tensor]:
        """The joint of a round, whose last tensor is that of `outward`, as it is to be applied; changed in place.

        Args:
            joined: the mean over so many clients, each of which counts 1.
            num_changes: so many tensors, the first, are of parameters.
        """
        *rest, within = joined
        if self._on_sum is None:
            return rest
        multiplier, count_deviation, quantile = self._on_sum
        generator = self._generator("server", round_number)
        factor, expected = num_summed / self._num_expected, self._num_expected
        deviation = multiplier * self._clip / expected
        for tensor in rest[:num_changes]:
            noise = torch.randn(tensor.shape, dtype=tensor.dtype, generator=generator)
            tensor.mul_(factor).add_(noise.to(tensor.device), alpha=deviation)
        if quantile is not None:
            noise_of_count = float(torch.randn(1, dtype=torch.float64, generator=generator))
            count = float(within) * num_summed + count_deviation * noise_of_count
            self._clip = adapted_clip(self._clip, 0.5 + count / expected, target=quantile)
        return rest

    def own_state(self) -> dict[str, OwnState]:
        clip = torch.tensor([self._clip], dtype=torch.float64)
        return {_CLIP: OwnState(clip, "same"), _TERMS: OwnState(self._terms, "same")}

    def restore(self, own: Mapping[str, Tensor]) -> None:
        """Take up what `own_state` gave. Raises UsageError where rounds have cost something else so far."""
        terms, of_older_versions = self._terms, self._terms[:_NUM_OLDER]
        saved = own.get(_TERMS, of_older_versions if _CLIP in own else torch.zeros(0))
        if not torch.equal(saved, terms) and not torch.equal(saved, of_older_versions):
            raise UsageError(
                f"epsilon of all rounds cannot be told: those before the checkpoint had other noise than privacy="
                f"{self._privacy}, or none, or other numbers of clients, or another sampler; resume with the options "
                "that the run began with, or begin a run anew"
            )
        if self._privacy.follows_norms:
            self._clip = float(own[_CLIP])

    @property
    def _terms(self) -> Tensor:
        """These numbers decide what a round costs, and who pays it."""
        participation = self._roster.participation
        terms = [self._on_sum is not None, self._privacy.noise, self._rate, participation.num_clients]
        if self._on_sum is None:  # who has had how many turns
            terms.append(derive(0, "sampler", str(participation.sampler)))
        return torch.tensor(terms, dtype=torch.float64)

    def _generator(self, *of: str | int) -> torch.Generator:
        return torch.Generator().manual_seed(derive(self._seed, "privacy", *of))
