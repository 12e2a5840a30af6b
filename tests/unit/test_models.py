"""The reference models have the papers' sizes and take images of their data sets."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from paceline.errors import UsageError
from paceline.models import NAMES, build
from paceline.models.resnet18 import resnet18
from paceline.models.vgg16 import vgg16

MNIST, CIFAR10, DIGITS = (1, 28, 28), (3, 32, 32), (1, 8, 8)
NUM_PARAMETERS = {
    "convnet": (CIFAR10, 3_094),
    "digitsnet": (DIGITS, 9_930),
    "fedavg-cnn": (MNIST, 1_663_370),
    "lenet": (MNIST, 13_426),
    "mlp": (MNIST, 199_210),
    "resnet18": (CIFAR10, 11_173_962),
    "vgg16": (CIFAR10, 14_728_266),
}


def count_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def test_every_model_has_a_known_size() -> None:
    assert set(NAMES) == set(NUM_PARAMETERS)


def test_the_network_of_the_fedavg_paper_begins_as_glorot_and_bengio_have_it() -> None:
    """Uniform within the root of 6 / (inputs + outputs) of a weight, by which published rounds come out."""
    for layer in build("fedavg-cnn"):
        if isinstance(layer, nn.Conv2d | nn.Linear):
            kernel = layer.weight[0, 0].numel()
            bound = math.sqrt(6 / (kernel * (layer.weight.shape[0] + layer.weight.shape[1])))
            assert 0.99 * bound < layer.weight.max() <= bound
            assert layer.bias.count_nonzero() == 0


@pytest.mark.parametrize("name", NAMES)
def test_num_parameters_and_default_shape(name: str) -> None:
    shape, num_parameters = NUM_PARAMETERS[name]
    model = build(name)
    assert count_parameters(model) == num_parameters
    assert model(torch.randn(2, *shape)).shape == (2, 10)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", [CIFAR10, MNIST, (3, 48, 64)])
def test_other_shapes_and_classes(name: str, shape: tuple[int, int, int]) -> None:
    if name == "vgg16" and shape == MNIST:
        with pytest.raises(UsageError, match="vgg16 needs images of at least 32x32 pixels, not 28x28"):
            build(name, shape=shape)
        return
    assert build(name, num_classes=7, shape=shape)(torch.randn(2, *shape)).shape == (2, 7)


@pytest.mark.parametrize("model", [resnet18, vgg16])
def test_width_scales_every_layer(model: Callable[..., nn.Module]) -> None:
    """Every tensor keeps its place; each dimension that was 64, 128, 256 or 512 channels is an eighth of that."""
    full, narrow = model().state_dict(), model(width=8).state_dict()
    assert list(narrow) == list(full)
    for name, tensor in full.items():
        expected = [size // 8 if size >= 64 else size for size in tensor.shape]
        assert list(narrow[name].shape) == expected, name
    assert model(width=8)(torch.randn(2, *CIFAR10)).shape == (2, 10)


@pytest.mark.parametrize(("name", "pixels"), [("convnet", 5), ("digitsnet", 2), ("fedavg-cnn", 4), ("vgg16", 32)])
def test_smallest_image(name: str, pixels: int) -> None:
    images = torch.randn(2, 3, pixels, pixels)
    assert build(name, shape=(3, pixels, pixels))(images).shape == (2, 10)
    with pytest.raises(UsageError, match=f"{name} needs images of at least {pixels}x{pixels} pixels"):
        build(name, shape=(3, pixels, pixels - 1))


@pytest.mark.parametrize("name", NAMES)
def test_every_parameter_gets_a_gradient(name: str) -> None:
    shape, _ = NUM_PARAMETERS[name]
    torch.manual_seed(0)
    model = build(name)
    F.cross_entropy(model(torch.randn(4, *shape)), torch.arange(4)).backward()  # type: ignore[no-untyped-call]
    for parameter_name, parameter in model.named_parameters():
        assert parameter.grad is not None, parameter_name
        assert parameter.grad.isfinite().all(), parameter_name
        # A bias before batch normalisation has no effect, so its gradient is nothing but rounding.
        if name != "vgg16" or parameter.dim() > 1:
            assert parameter.grad.any(), parameter_name


def test_resnet18_halves_the_image_three_times() -> None:
    features = nn.Sequential(*list(build("resnet18").children())[:-3])
    assert features(torch.randn(1, *CIFAR10)).shape == (1, 512, 4, 4)


def test_unknown_name_suggests_the_near_miss() -> None:
    with pytest.raises(UsageError, match="unknown model 'resnet-18'; did you mean 'resnet18'"):
        build("resnet-18")
