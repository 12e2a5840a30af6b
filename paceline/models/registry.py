"""The models by name."""

from collections.abc import Mapping
from typing import Protocol

from torch import nn

from paceline.errors import unknown
from paceline.models.convnet import convnet
from paceline.models.digitsnet import digitsnet
from paceline.models.fedavg_cnn import fedavg_cnn
from paceline.models.lenet import lenet
from paceline.models.mlp import mlp
from paceline.models.resnet18 import resnet18
from paceline.models.shape import ImageShape
from paceline.models.vgg16 import vgg16


class Builder(Protocol):
    """A model's function; its default shape is the one of the paper."""

    def __call__(self, *, num_classes: int = 10, shape: ImageShape = ...) -> nn.Module: ...


BUILDERS: Mapping[str, Builder] = {
    "convnet": convnet,
    "digitsnet": digitsnet,
    "fedavg-cnn": fedavg_cnn,
    "lenet": lenet,
    "mlp": mlp,
    "resnet18": resnet18,
    "vgg16": vgg16,
}
NAMES = tuple(BUILDERS)


def build(name: str, *, num_classes: int = 10, shape: ImageShape | None = None) -> nn.Module:
    """A freshly initialised model, which maps images float32 [B, C, H, W] to logits [B, num_classes].

    Args:
        name: `convnet`, `digitsnet`, `fedavg-cnn`, `lenet`, `mlp`, `resnet18` or `vgg16`.
        num_classes: how many classes to tell apart.
        shape: channels, height and width of an image; by default those of the data set that the model was made for.

    Raises:
        UsageError: there is no such model, or images of this shape are too small for it.

    >>> import torch
    >>> build("mlp", num_classes=62)(torch.zeros(5, 1, 28, 28)).shape
    torch.Size([5, 62])
    """
    if name not in BUILDERS:
        raise unknown("model", name, BUILDERS)
    builder = BUILDERS[name]
    return builder(num_classes=num_classes) if shape is None else builder(num_classes=num_classes, shape=shape)
