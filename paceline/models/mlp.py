"""The multilayer perceptron of the FedAvg paper."""

import math

from torch import nn

from paceline.models.shape import ImageShape


def mlp(*, num_classes: int = 10, shape: ImageShape = (1, 28, 28)) -> nn.Module:
    """Two hidden layers of 200 units with ReLU: 199,210 parameters on MNIST.

    The "2NN" of McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", 2017,
    section 3.
    """
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(math.prod(shape), 200),
        nn.ReLU(),
        nn.Linear(200, 200),
        nn.ReLU(),
        nn.Linear(200, num_classes),
    )
