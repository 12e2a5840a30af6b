"""The convolutional network of the FedAvg paper."""

from torch import nn

from paceline.models.shape import ImageShape, require_pixels


def fedavg_cnn(*, num_classes: int = 10, shape: ImageShape = (1, 28, 28)) -> nn.Module:
    """Two 5x5 convolutions of 32 and 64 filters, 2x2 max pooling after each, 512 units: 1,663,370 parameters on MNIST.

    McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", 2017, section 3. Its
    parameter count tells that the convolutions keep the image's size. The softmax is left to the loss. The first
    weights are uniform by Glorot and Bengio's rule, 2010, and biases 0, as in TensorFlow Federated's network of this
    paper. Raises UsageError for images smaller than 4x4 pixels.
    """
    require_pixels(shape, at_least=4, model="fedavg-cnn")
    num_channels, height, width = shape
    model = nn.Sequential(
        nn.Conv2d(num_channels, 32, kernel_size=5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, kernel_size=5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * (height // 4) * (width // 4), 512),
        nn.ReLU(),
        nn.Linear(512, num_classes),
    )
    for parameter in model.parameters():
        if parameter.dim() == 1:
            nn.init.zeros_(parameter)
        else:
            nn.init.xavier_uniform_(parameter)
    return model
