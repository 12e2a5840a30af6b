"""Two Keras models that one process trains side by side, and that meet every few steps: what two workers are to find.

python side_by_side.py EVERY EPOCHS GLOBAL_BATCH OUT.npz
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np

LR = 0.05


def global_batches(num_samples: int, *, epochs: int, global_batch: int) -> list[list[Any]]:
    """Each rank's indices, step by step."""
    orders = [np.random.default_rng(epoch).permutation(num_samples) for epoch in range(epochs)]
    starts = range(0, num_samples - global_batch + 1, global_batch)
    return [np.split(order[start : start + global_batch], 2) for order in orders for start in starts]


def main() -> None:
    import keras
    from keras_mnist import GRADIENTS, build

    from paceline.data import load

    every, epochs, global_batch = map(int, sys.argv[1:4])
    data = load("digits")
    x, y = data.train[:][0].flatten(1).numpy(), data.train[:][1].numpy()
    models = [build(x.shape[1], data.num_classes) for _ in range(2)]
    optimizers = [keras.optimizers.SGD(LR, momentum=0.9) for _ in models]
    gradients_of = GRADIENTS[keras.backend.backend()]
    batches = global_batches(len(x), epochs=epochs, global_batch=global_batch)
    for number, each in enumerate(batches, 1):
        for model, optimizer, own in zip(models, optimizers, each, strict=True):
            optimizer.apply(gradients_of(model, x[own], y[own]), model.trainable_variables)
        if number % every == 0 or number == len(batches):
            mean = [(one + other) / 2 for one, other in zip(*(model.get_weights() for model in models), strict=True)]
            for model in models:
                model.set_weights(mean)
    np.savez(sys.argv[4], *models[0].get_weights())


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[3] / "recipes" / "other_frameworks"))
    main()
