"""A convolutional network so small that its exchange is all latency."""

from torch import nn

from paceline.models.shape import ImageShape, require_pixels


def convnet(*, num_classes: int = 10, shape: ImageShape = (3, 32, 32)) -> nn.Module:
    """One 3x3 convolution of 3 filters, 3x3 max pooling, ReLU and a linear layer: 3,094 parameters on CIFAR-10.

    From no paper: a network that learns something (48 % of CIFAR-10's test images after six epochs of SGD with batches
    of 100 and a learning rate of 0.05) with 12 kB of gradients, so that bandwidth does not matter. Raises UsageError
    for images smaller than 5x5 pixels.
    """
    require_pixels(shape, at_least=5, model="convnet")
    num_channels, height, width = shape
    return nn.Sequential(
        nn.Conv2d(num_channels, 3, kernel_size=3),
        nn.MaxPool2d(3),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(3 * ((height - 2) // 3) * ((width - 2) // 3), num_classes),
    )
