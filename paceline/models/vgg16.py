"""The 16-layer VGG network with batch normalisation, for small images."""

from __future__ import annotations

from torch import nn

from paceline.models.shape import ImageShape, require_pixels

STAGES = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))


def vgg16(*, num_classes: int = 10, shape: ImageShape = (3, 32, 32)) -> nn.Module:
    """Thirteen 3x3 convolutions in five stages, 2x2 max pooling after each: 14,728,266 parameters on CIFAR-10.

    Simonyan and Zisserman, "Very Deep Convolutional Networks for Large-Scale Image Recognition", 2015, table 1,
    column D, with batch normalisation (Ioffe and Szegedy, 2015) after each convolution. On 32x32 pixels the five
    poolings leave one, so a single linear layer takes the place of the paper's three.

    Raises:
        UsageError: images smaller than 32x32 pixels.
    """
    require_pixels(shape, at_least=32, model="vgg16")
    num_inputs, height, width = shape
    layers: list[nn.Module] = []
    for stage in STAGES:
        for num_outputs in stage:
            layers += [
                nn.Conv2d(num_inputs, num_outputs, kernel_size=3, padding=1),
                nn.BatchNorm2d(num_outputs),
                nn.ReLU(),
            ]
            num_inputs = num_outputs
        layers.append(nn.MaxPool2d(2))
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(num_inputs * (height // 32) * (width // 32), num_classes))
