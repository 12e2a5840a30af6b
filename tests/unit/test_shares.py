"""How a rank's share is cut into blocks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from paceline.comm.shared_memory.shares import blocks_of


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(("threads", "most"), [(1, 65536), (2, 32768)])
def test_blocks_are_small_enough_for_torch_to_start_no_threads(threads: int, most: int) -> None:
    torch.set_num_threads(threads)
    ours, theirs = torch.arange(100_000.0), torch.arange(100_000.0) + 1
    blocks = blocks_of([ours, theirs])
    assert max(len(one) for one, _ in blocks) == most
    assert torch.equal(torch.cat([one for one, _ in blocks]), ours)
    assert torch.equal(torch.cat([other for _, other in blocks]), theirs)
