"""The conv net of `recipes/mnist_mirrored.py` under TensorFlow's own strategies, as its guides write it. For a Python
that has tensorflow and tf-keras, which do not load beside torch; it imports nothing of Paceline.

    python tensorflow_mnist.py STRATEGY WORKERS DATA.npz BATCH_SIZE EPOCHS

STRATEGY is one-device, mirrored, multi-worker or parameter-server. Prints a line of JSON: samples per second after the
first steps, and the share of test images that the trained model knows. Or it is `step`, and EPOCHS counts steps: what
one takes of a core without a strategy, with one thread.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

os.environ["TF_USE_LEGACY_KERAS"] = "1"  # Keras 3 knows no parameter servers
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

WARM_UP_STEPS = 50
LEARNING_RATE = 1e-3


def tensorflow() -> Any:
    """Loaded late: what it is to do first stands in the environment."""
    return importlib.import_module("tensorflow")


def make_model(tf: Any) -> Any:
    layers = tf.keras.layers
    return tf.keras.Sequential(
        [
            layers.Input((28, 28, 1)),
            layers.Conv2D(32, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(64, activation="relu"),
            layers.Dense(10),
        ]
    )


def dataset(tf: Any, data: Any, batch_size: int) -> Any:
    """Shuffled images of the whole set, again and again, in batches of one size."""
    whole = tf.data.Dataset.from_tensor_slices((data["train_x"], data["train_y"]))
    return whole.shuffle(len(data["train_y"]), seed=0).repeat().batch(batch_size, drop_remainder=True).prefetch(2)


def accuracy(model: Any, data: Any) -> float:
    found = model.predict(data["test_x"], batch_size=2000, verbose=0).argmax(axis=1)
    return float((found == data["test_y"]).mean())


def step_of(tf: Any, model: Any, optimizer: Any, global_batch: int) -> Callable[[Any, Any], None]:
    """One replica's step, whose gradients the strategy sums."""

    def step(images: Any, labels: Any) -> None:
        with tf.GradientTape() as tape:
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, model(images, training=True))
            loss = tf.reduce_sum(losses) / global_batch
        variables = model.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))

    return step


def train_mirrored(tf: Any, strategy: Any, data: Any, batch_size: int, epochs: int) -> tuple[float, Any]:
    """Samples a second, and the model."""
    global_batch = batch_size * strategy.num_replicas_in_sync
    with strategy.scope():
        model = make_model(tf)
        optimizer = tf.keras.optimizers.RMSprop(LEARNING_RATE)
    step = step_of(tf, model, optimizer, global_batch)

    train_step = tf.function(lambda images, labels: strategy.run(step, args=(images, labels)))
    batches = iter(strategy.experimental_distribute_dataset(dataset(tf, data, global_batch)))
    num_steps = epochs * len(data["train_y"]) // global_batch
    began_s = 0.0
    for number in range(num_steps):
        if number == WARM_UP_STEPS:
            began_s = time.monotonic()
        train_step(*next(batches))
    return (num_steps - WARM_UP_STEPS) * global_batch / (time.monotonic() - began_s), model


def train_with_servers(tf: Any, strategy: Any, workers: int, data: Any, batch_size: int, epochs: int) -> Any:
    """Each gradient is an update; the coordinator hands steps out to whichever worker is free."""
    with strategy.scope():
        model = make_model(tf)
        optimizer = tf.keras.optimizers.RMSprop(LEARNING_RATE)
        optimizer.build(model.trainable_variables)
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    step = step_of(tf, model, optimizer, batch_size)
    batches = iter(coordinator.create_per_worker_dataset(lambda: dataset(tf, data, batch_size)))

    train_step = tf.function(lambda iterator: strategy.run(step, args=next(iterator)))
    num_steps = epochs * len(data["train_y"]) // batch_size
    for _ in range(WARM_UP_STEPS * workers):
        coordinator.schedule(train_step, args=(batches,))
    coordinator.join()
    began_s = time.monotonic()
    num_left = num_steps - WARM_UP_STEPS * workers
    for _ in range(num_left):
        coordinator.schedule(train_step, args=(batches,))
    coordinator.join()
    return num_left * batch_size / (time.monotonic() - began_s), model


def limit_threads(tf: Any, processes: int) -> None:
    """A process's part of the cores, one at least."""
    share = max(1, len(os.sched_getaffinity(0)) // processes)
    tf.config.threading.set_intra_op_parallelism_threads(share)


def load(path: str) -> Any:
    import numpy

    with numpy.load(path) as file:
        return dict(file)


def on_one_host(name: str, workers: int, path: str, batch_size: int, epochs: int) -> dict[str, float]:
    tf = tensorflow()

    processor = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(processor, [tf.config.LogicalDeviceConfiguration()] * workers)
    devices = [f"CPU:{number}" for number in range(workers)]
    strategy = (
        tf.distribute.MirroredStrategy(devices) if name == "mirrored" else tf.distribute.OneDeviceStrategy(devices[0])
    )
    data = load(path)
    rate, model = train_mirrored(tf, strategy, data, batch_size, epochs)
    return {"samples_per_s": rate, "accuracy": accuracy(model, data)}


def one_of_many(cluster: dict[str, list[str]], rank: int, path: str, batch_size: int, epochs: int, told: Any) -> None:
    os.environ["TF_CONFIG"] = json.dumps({"cluster": cluster, "task": {"type": "worker", "index": rank}})
    tf = tensorflow()

    limit_threads(tf, len(cluster["worker"]))
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    data = load(path)
    rate, model = train_mirrored(tf, strategy, data, batch_size, epochs)
    score = accuracy(model, data)
    if rank == 0:
        told.put({"samples_per_s": rate, "accuracy": score})


def serve(cluster: dict[str, list[str]], job: str, index: int) -> None:
    """A worker or a server, until it is ended."""
    tf = tensorflow()

    limit_threads(tf, len(cluster["worker"]))
    tf.distribute.Server(tf.train.ClusterSpec(cluster), job_name=job, task_index=index, protocol="grpc").join()


def coordinate(cluster: dict[str, list[str]], path: str, batch_size: int, epochs: int) -> dict[str, float]:
    tf = tensorflow()

    spec = tf.train.ClusterSpec(cluster)
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(spec, rpc_layer="grpc")
    strategy = tf.distribute.ParameterServerStrategy(resolver)
    data = load(path)
    rate, model = train_with_servers(tf, strategy, len(cluster["worker"]), data, batch_size, epochs)
    local = make_model(tf)
    local.set_weights([variable.numpy() for variable in model.variables])
    return {"samples_per_s": rate, "accuracy": accuracy(local, data)}


def step_ms(path: str, batch_size: int, num_steps: int) -> dict[str, float]:
    tf = tensorflow()

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    model = make_model(tf)
    train_step = tf.function(step_of(tf, model, tf.keras.optimizers.RMSprop(LEARNING_RATE), batch_size))
    began_s, num_before = 0.0, 30
    for number, (images, labels) in enumerate(dataset(tf, load(path), batch_size).take(num_steps)):
        if number == num_before:
            began_s = time.process_time()
        train_step(images, labels)
    return {"step_ms": (time.process_time() - began_s) / (num_steps - num_before) * 1e3}


def free_addresses(number: int) -> list[str]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(number)]
    addresses = [f"127.0.0.1:{each.getsockname()[1]}" for each in sockets]
    for each in sockets:
        each.close()
    return addresses


def main() -> None:
    name, workers, path = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    batch_size, epochs = int(sys.argv[4]), int(sys.argv[5])
    start = multiprocessing.get_context("spawn")
    if name == "multi-worker":
        told = start.SimpleQueue()
        cluster = {"worker": free_addresses(workers)}
        processes = [
            start.Process(target=one_of_many, args=(cluster, rank, path, batch_size, epochs, told))
            for rank in range(workers)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        if any(process.exitcode for process in processes):
            sys.exit("a worker has failed")
        result = told.get()
    elif name == "parameter-server":
        addresses = free_addresses(workers + 1)
        cluster = {"worker": addresses[1:], "ps": addresses[:1]}
        tasks = [("ps", 0), *(("worker", index) for index in range(workers))]
        processes = [start.Process(target=serve, args=(cluster, *task), daemon=True) for task in tasks]
        for process in processes:
            process.start()
        result = coordinate(cluster, path, batch_size, epochs)
        for process in processes:
            process.kill()
    elif name == "step":
        result = step_ms(path, batch_size, epochs)
    else:
        result = on_one_host(name, workers, path, batch_size, epochs)
    print(json.dumps(result), flush=True)
    os._exit(0)  # a coordinator waits for its servers, which have been ended


if __name__ == "__main__":
    main()
