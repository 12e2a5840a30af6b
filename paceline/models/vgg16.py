"""The 16-layer VGG network with batch normalisation, for small images."""

from torch import nn

from paceline.models.shape import ImageShape, require_pixels

STAGES = ((1, 1), (2, 2), (4, 4, 4), (8, 8, 8), (8, 8, 8))
"""How many times as many filters as the first stage each convolution has, stage by stage."""


def vgg16(*, num_classes: int = 10, shape: ImageShape = (3, 32, 32), width: int = 64) -> nn.Module:
    """Thirteen 3x3 convolutions in five stages, 2x2 max pooling after each: 14,728,266 parameters on CIFAR-10.

    Simonyan and Zisserman, "Very Deep Convolutional Networks for Large-Scale Image Recognition", 2015, table 1, column
    D, with batch normalisation (Ioffe and Szegedy, 2015) after each convolution. On 32x32 pixels the five poolings
    leave one, so a single linear layer takes the place of the paper's three. The first stage has `width` filters.
    Raises UsageError for images smaller than 32x32 pixels.
    """
    require_pixels(shape, at_least=32, model="vgg16")
    num_inputs, image_height, image_width = shape
    layers: list[nn.Module] = []
    for stage in STAGES:
        for factor in stage:
            num_outputs = factor * width
            layers += [
                nn.Conv2d(num_inputs, num_outputs, kernel_size=3, padding=1),
                nn.BatchNorm2d(num_outputs),
                nn.ReLU(),
            ]
            num_inputs = num_outputs
        layers.append(nn.MaxPool2d(2))
    return nn.Sequential(
        *layers, nn.Flatten(), nn.Linear(num_inputs * (image_height // 32) * (image_width // 32), num_classes)
    )
