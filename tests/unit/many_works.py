"""Many all-reduces of different kinds that are under way at once, and ended in some order."""

from __future__ import annotations

import time

import torch

from paceline.comm.base import Collective

FORMS = [(40_000, True), (3, True), (100_000, False), (50, False), (30_000, True)] * 14
"""Lengths, and whether the tensor lies in allocated memory."""


def run_many(collective: Collective, order: str) -> list[float]:
    """On a rank: the sums, once all works were waited for in order, backwards, by polling, or behind a barrier."""
    rows = collective.allocate(4 * 40_000 * len(FORMS)).view(torch.float32).view(len(FORMS), 40_000)
    tensors = [
        (row[:length] if allocated else torch.empty(length)).fill_(number + collective.rank)
        for number, (row, (length, allocated)) in enumerate(zip(rows, FORMS, strict=True))
    ]
    works = [collective.all_reduce(tensor) for tensor in tensors]
    if order == "backwards":
        works.reverse()
    if order == "poll":
        while unfinished := [work for work in works if not work.poll()]:
            time.sleep(1e-4 * len(unfinished))
    if order == "barrier":
        collective.barrier()
    for work in works:
        work.wait()
    assert all(tensor.eq(tensor[0]).all() for tensor in tensors)
    return [float(tensor[0]) for tensor in tensors]


def sums_of_many(size: int) -> list[float]:
    """What every rank of so many finds."""
    return [float(sum(number + rank for rank in range(size))) for number in range(len(FORMS))]
