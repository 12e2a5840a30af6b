"""Masks under which updates of a served run travel, as either end has them."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from paceline.layout import TensorSpec
from paceline.served.form import Form
from paceline.served.masking import Masking
from paceline.strategies.federated.secured import LEAST_CLIENTS, Masks

if TYPE_CHECKING:
    from paceline.served.masked_round import MaskedRound
    from paceline.served.masked_turn import MaskedTurn


def form_under(masks: Masks | None, update: Sequence[TensorSpec]) -> Form:
    """What an update travels as: under masks as words, one an element."""
    if masks is None:
        return Form(tuple(update))
    return Form((TensorSpec("words", (sum(math.prod(spec.shape) for spec in update),), torch.int32),))


def round_under(
    masks: Masks | None, update: Form, *, seed: int
) -> "Callable[[Mapping[int, float], int], MaskedRound] | None":
    """What begins a round at the server."""
    if masks is None:
        return None
    from paceline.served.masked_round import MaskedRound  # not every installation has what it encrypts with

    masking = _masking(masks, update, seed=seed)
    return lambda weights, number: MaskedRound(weights, masking, number=number)


def turn_under(
    masks: Masks | None, update: Form, *, client: int, seed: int
) -> "Callable[[Mapping[str, Any], int], MaskedTurn] | None":
    """What begins a turn at a client."""
    if masks is None:
        return None
    from paceline.served.masked_turn import MaskedTurn

    masking = _masking(masks, update, seed=seed)
    return lambda told, number: MaskedTurn(client, told, masking, round_number=number)


def _masking(masks: Masks, update: Form, *, seed: int) -> Masking:
    (words,) = update.specs
    return Masking(
        clip=masks.clip,
        num_neighbours=masks.neighbours,
        threshold=masks.threshold,
        least=LEAST_CLIENTS,
        num_elements=math.prod(words.shape),
        seed=seed,
    )
