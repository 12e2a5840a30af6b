"""Trains a perceptron in JAX: with one gradient of all workers at every step, or with models that meet now and then.

    python recipes/other_frameworks/jax_mnist.py
    paceline run recipes/other_frameworks/jax_mnist.py --strategy all-reduce --workers 2 -- --every 8

Needs `pip install jax`.
"""

import argparse
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import paceline
from paceline.data import load

Tree = Any
"""Arrays in lists and dicts."""


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", choices=("digits", "mnist"), default="digits")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--global-batch", type=int, default=64, help="images per step of all workers together")
    parser.add_argument(
        "--every", type=int, default=0, help="average models every N steps, instead of gradients at each"
    )
    parser.add_argument("--save", type=Path, help="write the model here, as .npz")
    return parser.parse_args()


def initial(num_inputs: int, num_classes: int, *, num_hidden: int = 64) -> Tree:
    keys = jax.random.split(jax.random.key(0))
    sizes = [(num_inputs, num_hidden), (num_hidden, num_classes)]
    return [
        {"weight": jax.random.normal(key, size) * size[0] ** -0.5, "bias": jnp.zeros(size[1])}
        for key, size in zip(keys, sizes, strict=True)
    ]


def logits(layers: Tree, x: jax.Array) -> jax.Array:
    *hidden, last = layers
    for layer in hidden:
        x = jax.nn.relu(x @ layer["weight"] + layer["bias"])
    return x @ last["weight"] + last["bias"]


def loss(layers: Tree, x: jax.Array, y: jax.Array) -> jax.Array:
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits(layers, x)), y[:, None], axis=1)
    return -chosen.mean()


@jax.jit
def update(layers: Tree, velocity: Tree, gradient: Tree, lr: float, momentum: float) -> tuple[Tree, Tree]:
    velocity = jax.tree.map(lambda v, g: momentum * v + g, velocity, gradient)
    return jax.tree.map(lambda p, v: p - lr * v, layers, velocity), velocity


def main() -> None:
    args = parse_arguments()
    worker = paceline.init()
    if args.global_batch % worker.size:
        raise SystemExit(f"--global-batch {args.global_batch} cannot be divided among {worker.size} workers")
    data = load(args.dataset)
    x, y = (array.flatten(1).numpy() if array.ndim > 1 else array.numpy() for array in data.train[:])
    layers = worker.broadcast_tree(initial(x.shape[1], data.num_classes))
    velocity = jax.tree.map(jnp.zeros_like, layers)
    gradient_of = jax.jit(jax.grad(loss))
    per_worker = args.global_batch // worker.size
    num_steps = 0
    for epoch in range(args.epochs):
        order = np.random.default_rng(epoch).permutation(len(x))  # the same on all workers
        for start in range(0, len(order) - args.global_batch + 1, args.global_batch):
            if not worker.begin_step(per_worker):
                break
            own = order[start + worker.rank * per_worker :][:per_worker]
            gradient = gradient_of(layers, x[own], y[own])
            if not args.every:
                gradient = worker.all_reduce_tree(gradient)
            layers, velocity = update(layers, velocity, gradient, args.lr, args.momentum)
            num_steps += 1
            if args.every and num_steps % args.every == 0:
                layers = worker.all_reduce_tree(layers)
    if args.every and num_steps % args.every:
        layers = worker.all_reduce_tree(layers)
    worker.end_step()  # what follows is no training
    if worker.rank == 0:
        test_x, test_y = data.test[:]
        guesses = logits(layers, test_x.flatten(1).numpy()).argmax(axis=1)
        print(f"accuracy {float((guesses == test_y.numpy()).mean()):.4f}")
        if args.save is not None:
            np.savez(args.save, *map(np.asarray, jax.tree.leaves(layers)))


if __name__ == "__main__":
    main()
