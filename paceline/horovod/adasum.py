"""Adasum: gradients that agree are averaged, those that are orthogonal are added (Maleki et al., MLSys 2021)."""

import torch
from torch import Tensor

from paceline.comm.base import Collective


def combine(mine: Tensor, theirs: Tensor) -> Tensor:
    """Join two gradients (section 3, equation 8): each loses half of what the other has in its direction.

    float64 sums; the result has the first one's dtype.
    """
    a, b = mine.double().flatten(), theirs.double().flatten()
    dot, a_norm, b_norm = a @ b, a @ a, b @ b
    a_part = 1 - dot / (2 * a_norm) if a_norm > 0 else torch.ones(())
    b_part = 1 - dot / (2 * b_norm) if b_norm > 0 else torch.ones(())
    return (a_part * a + b_part * b).view(mine.shape).to(mine.dtype)


def adasum(tensor: Tensor, collective: Collective) -> Tensor:
    """Join all ranks' tensors, whose number is a power of two: pairs at distance 1, 2, 4 and so on (section 4.2)."""
    result = tensor.clone()
    distance = 1
    while distance < collective.size:
        partner = collective.rank ^ distance
        theirs = torch.empty_like(result)
        works = [collective.recv(theirs, source=partner), collective.send(result, destination=partner)]
        for work in works:
            work.wait()
        low, high = (result, theirs) if collective.rank < partner else (theirs, result)
        result = combine(low, high)  # in one order, so that both have the same bits
        distance *= 2
    return result
