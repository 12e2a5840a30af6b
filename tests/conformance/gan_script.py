"""The recipe of a GAN, made small: a script with two models and two optimizers."""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

from paceline.data import Dataset, Split, load

_SPEC = importlib.util.spec_from_file_location("gan", Path(__file__).parents[2] / "recipes" / "gan.py")
assert _SPEC is not None
assert _SPEC.loader is not None
gan = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(gan)


def some_digits() -> Dataset:
    digits = load("digits")
    train, test = (
        Split(split.images[:count], split.labels[:count], split.mean.double(), split.std.double())
        for split, count in ((digits.train, 50), (digits.test, 32))
    )
    return Dataset("digits", _Double(train), _Double(test), digits.num_classes, digits.shape)  # type: ignore[arg-type]


class _Double(TensorDataset):
    """A split whose images are float64."""

    def __init__(self, split: Split) -> None:
        images, labels = split[:]
        super().__init__(images.double(), labels)

    def __getitems__(self, indices: list[int]) -> Any:
        return self[torch.tensor(indices)]


def train_gan(worker: Any, *, epochs: int = 3) -> nn.Module:
    torch.set_default_dtype(torch.float64)
    args = gan.parse_arguments([])
    args = argparse.Namespace(**{**vars(args), "latent": 4, "width": 2, "batch_size": 4, "epochs": epochs})
    models = dict(zip(("generator", "discriminator"), gan.train(worker, some_digits(), args), strict=True))
    return nn.ModuleDict(models)
