"""The 18-layer residual network, for small images."""

from typing import final

from torch import Tensor, nn
from torch.nn import functional as F

from paceline.models.shape import ImageShape


def resnet18(*, num_classes: int = 10, shape: ImageShape = (3, 32, 32), width: int = 64) -> nn.Module:
    """Four stages of two residual blocks, of 64, 128, 256 and 512 channels: 11,173,962 parameters on CIFAR-10.

    He et al., "Deep Residual Learning for Image Recognition", 2016, table 1, column "18-layer", with projection
    shortcuts where the size changes (option B). As in its section 4.2, on CIFAR-10, the first layer is a 3x3
    convolution of stride 1, without max pooling. Any image size does. The first stage has `width` channels; each
    further stage doubles them.
    """
    num_channels, _, _ = shape
    return nn.Sequential(
        _convolution(num_channels, width, kernel_size=3),
        nn.ReLU(),
        *_stage(width, width, stride=1),
        *_stage(width, 2 * width, stride=2),
        *_stage(2 * width, 4 * width, stride=2),
        *_stage(4 * width, 8 * width, stride=2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8 * width, num_classes),
    )


def _stage(num_inputs: int, num_outputs: int, *, stride: int) -> tuple[nn.Module, nn.Module]:
    return ResidualBlock(num_inputs, num_outputs, stride=stride), ResidualBlock(num_outputs, num_outputs, stride=1)


def _convolution(num_inputs: int, num_outputs: int, *, kernel_size: int, stride: int = 1) -> nn.Sequential:
    """A convolution and its batch normalisation, whose shift makes a bias superfluous."""
    return nn.Sequential(
        nn.Conv2d(num_inputs, num_outputs, kernel_size, stride=stride, padding=kernel_size // 2, bias=False),
        nn.BatchNorm2d(num_outputs),
    )


@final
class ResidualBlock(nn.Module):
    """Two 3x3 convolutions whose result is added to the input (He et al., figure 2)."""

    def __init__(self, num_inputs: int, num_outputs: int, *, stride: int) -> None:
        super().__init__()
        self.residual = nn.Sequential(
            _convolution(num_inputs, num_outputs, kernel_size=3, stride=stride),
            nn.ReLU(),
            _convolution(num_outputs, num_outputs, kernel_size=3),
        )
        same_shape = stride == 1 and num_inputs == num_outputs
        self.shortcut = (
            nn.Identity() if same_shape else _convolution(num_inputs, num_outputs, kernel_size=1, stride=stride)
        )

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.shortcut(x) + self.residual(x))
