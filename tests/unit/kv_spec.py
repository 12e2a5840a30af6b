"""The small stores of tests, and their keys."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from paceline.kv import Spec

NUM_KEYS = 12
KEYS = st.lists(st.integers(0, NUM_KEYS - 1), unique=True, max_size=6).map(sorted)


def spec_of(**settings: Any) -> Spec:
    given_ = {"servers": 2, "workers": 2, "num_keys": NUM_KEYS, "dtype": torch.float64, **settings}
    return Spec(**given_)


def tensor(keys: Sequence[int]) -> Tensor:
    return torch.tensor(keys, dtype=torch.int64)
