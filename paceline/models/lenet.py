"""The network of sigmoids on which gradients were first turned back into images."""

import torch
from torch import nn

from paceline.models.shape import ImageShape, require_pixels

_FILTERS = 12
_SPREAD = 0.5


def lenet(*, num_classes: int = 10, shape: ImageShape = (1, 28, 28)) -> nn.Module:
    """Three 5x5 convolutions of 12 filters with sigmoids, and a linear layer; weights are drawn between -0.5 and 0.5.

    Zhu et al., "Deep Leakage from Gradients", NeurIPS 2019, section 4.1. Raises UsageError for images smaller than 4x4
    pixels.
    """
    require_pixels(shape, at_least=4, model="lenet")
    num_channels, height, width = shape
    model = nn.Sequential(
        nn.Conv2d(num_channels, _FILTERS, kernel_size=5, padding=2, stride=2),
        nn.Sigmoid(),
        nn.Conv2d(_FILTERS, _FILTERS, kernel_size=5, padding=2, stride=2),
        nn.Sigmoid(),
        nn.Conv2d(_FILTERS, _FILTERS, kernel_size=5, padding=2),
        nn.Sigmoid(),
        nn.Flatten(),
        nn.Linear(_FILTERS * -(-height // 4) * -(-width // 4), num_classes),
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_(-_SPREAD, _SPREAD)
    return model
