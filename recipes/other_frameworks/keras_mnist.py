"""Trains a Keras model by a loop of its own, on the backend torch, jax or tensorflow.

    KERAS_BACKEND=jax python recipes/other_frameworks/keras_mnist.py
    KERAS_BACKEND=torch paceline run recipes/other_frameworks/keras_mnist.py --strategy all-reduce --workers 2

With `--every N` models meet every N steps instead of gradients at each; with `--fit` Keras' own `fit` trains, and
models meet likewise. Needs `pip install keras`, and the backend.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np

import paceline
from paceline.data import load

LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
Gradients = Callable[[keras.Model, Any, Any], list[Any]]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", choices=("digits", "mnist"), default="digits")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--global-batch", type=int, default=64, help="images per step of all workers together")
    parser.add_argument(
        "--every", type=int, default=0, help="average models every N steps, instead of gradients at each"
    )
    parser.add_argument("--fit", action="store_true", help="train by Keras' fit; --every is then at least 1")
    parser.add_argument("--save", type=Path, help="write the model's weights here, as .npz")
    return parser.parse_args()


def build(num_inputs: int, num_classes: int) -> keras.Model:
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(64, activation="relu"), keras.layers.Dense(num_classes)]
    return keras.Sequential([keras.Input((num_inputs,)), *layers])


def gradients_of_torch(model: keras.Model, x: Any, y: Any) -> list[Any]:
    model.zero_grad()
    LOSS(y, model(x, training=True)).backward()
    return [variable.value.grad for variable in model.trainable_variables]


def gradients_of_tensorflow(model: keras.Model, x: Any, y: Any) -> list[Any]:
    import tensorflow as tf

    with tf.GradientTape() as tape:
        loss = LOSS(y, model(x, training=True))
    return list(tape.gradient(loss, model.trainable_variables))


def gradients_of_jax(model: keras.Model, x: Any, y: Any) -> list[Any]:
    import jax

    def loss_of(trained: list[Any], others: list[Any]) -> tuple[Any, list[Any]]:
        predicted, others = model.stateless_call(trained, others, x, training=True)
        return LOSS(y, predicted), others

    values = [[v.value for v in held] for held in (model.trainable_variables, model.non_trainable_variables)]
    gradients, others = jax.grad(loss_of, has_aux=True)(*values)
    for variable, value in zip(model.non_trainable_variables, others, strict=True):
        variable.assign(value)
    return list(gradients)


GRADIENTS: dict[str, Gradients] = {
    "torch": gradients_of_torch,
    "jax": gradients_of_jax,
    "tensorflow": gradients_of_tensorflow,
}


def average(worker: paceline.Worker, model: keras.Model) -> None:
    model.set_weights(worker.all_reduce_tree(model.get_weights()))


def train(worker: paceline.Worker, model: keras.Model, x: Any, y: Any, args: argparse.Namespace) -> None:
    optimizer = keras.optimizers.SGD(args.lr, momentum=0.9)
    gradients_of = GRADIENTS[keras.backend.backend()]
    per_worker = args.global_batch // worker.size
    num_steps = 0
    for epoch in range(args.epochs):
        order = np.random.default_rng(epoch).permutation(len(x))  # the same on all workers
        for start in range(0, len(order) - args.global_batch + 1, args.global_batch):
            if not worker.begin_step(per_worker):
                break
            own = order[start + worker.rank * per_worker :][:per_worker]
            gradients = gradients_of(model, x[own], y[own])
            if not args.every:
                gradients = worker.all_reduce_tree(gradients)
            optimizer.apply(gradients, model.trainable_variables)
            num_steps += 1
            if args.every and num_steps % args.every == 0:
                average(worker, model)
    if args.every and num_steps % args.every:
        average(worker, model)
    worker.end_step()  # what follows is no training


def fit(worker: paceline.Worker, model: keras.Model, x: Any, y: Any, args: argparse.Namespace) -> None:
    from paceline.compat.keras import Averaging

    model.compile(keras.optimizers.SGD(args.lr, momentum=0.9), LOSS)
    own = slice(worker.rank, len(x) // worker.size * worker.size, worker.size)
    averaging = Averaging(worker, every=max(1, args.every))
    batch_size = args.global_batch // worker.size
    model.fit(x[own], y[own], batch_size=batch_size, epochs=args.epochs, verbose=0, callbacks=[averaging])


def main() -> None:
    args = parse_arguments()
    worker = paceline.init()
    if args.global_batch % worker.size:
        raise SystemExit(f"--global-batch {args.global_batch} cannot be divided among {worker.size} workers")
    data = load(args.dataset)
    x, y = (array.flatten(1).numpy() if array.ndim > 1 else array.numpy() for array in data.train[:])
    model = build(x.shape[1], data.num_classes)
    model.set_weights(worker.broadcast_tree(model.get_weights()))
    (fit if args.fit else train)(worker, model, x, y, args)
    if worker.rank == 0:
        test_x, test_y = data.test[:]
        guesses = model.predict(test_x.flatten(1).numpy(), verbose=0).argmax(axis=1)
        print(f"accuracy {float((guesses == test_y.numpy()).mean()):.4f}")
        if args.save is not None:
            np.savez(args.save, *model.get_weights())


if __name__ == "__main__":
    main()
