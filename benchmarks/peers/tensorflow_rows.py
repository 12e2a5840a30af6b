"""Rows of a table under TensorFlow's ParameterServerStrategy: a pull, and a pull and push of as many by plain SGD. For
a Python that has tensorflow and tf-keras, which do not load beside torch; it imports nothing of Paceline.

    python -m peers.tensorflow_rows NUM_ROWS DIM BATCH WORKERS SERVERS STEPS

The table is a variable in one shard a server, which `embedding_lookup` reads and `scatter_sub` changes there. A worker
is given STEPS_AT_ONCE steps at a time, as TensorFlow's guide to parameter servers advises. Prints a line of JSON: by
way, rows a second of all workers together.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from typing import Any

from .tensorflow_mnist import free_addresses, serve, tensorflow

STEPS_AT_ONCE, WARM_UP, LEARNING_RATE = 10, 2, 0.1


def batches(tf: Any, num_rows: int, batch: int, seed: int) -> Any:
    """Unique keys, again and again; made before they are needed."""
    order = tf.data.Dataset.range(num_rows).shuffle(num_rows, seed=seed).batch(batch, drop_remainder=True).cache()
    return order.repeat().prefetch(4)


def ways_of(tf: Any, table: Any) -> dict[str, Callable[[Any], Any]]:
    """By name, what a worker does with some keys."""

    def pull(keys: Any) -> Any:
        return tf.reduce_sum(tf.nn.embedding_lookup(table, keys))

    def step(keys: Any) -> Any:
        with tf.GradientTape() as tape:
            total = pull(keys)
        for shard, gradient in zip(table.variables, tape.gradient(total, table.variables), strict=True):
            shard.scatter_sub(tf.IndexedSlices(LEARNING_RATE * gradient.values, gradient.indices))
        return total

    return {"pull": pull, "pull and push": step}


def several(tf: Any, way: Callable[[Any], Any]) -> Any:
    """Steps that a worker takes by itself."""

    def take(iterator: Any) -> Any:
        return tf.add_n([way(next(iterator)) for _ in range(STEPS_AT_ONCE)])

    return tf.function(take, autograph=False)


Rates = dict[str, float]


def measure(tf: Any, cluster: dict[str, list[str]], num_rows: int, dim: int, batch: int, steps: int) -> Rates:
    workers, servers = len(cluster["worker"]), len(cluster["ps"])
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(tf.train.ClusterSpec(cluster), rpc_layer="grpc")
    partitioner = tf.distribute.experimental.partitioners.FixedShardsPartitioner(servers)
    strategy = tf.distribute.ParameterServerStrategy(resolver, variable_partitioner=partitioner)
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    with strategy.scope():
        table = tf.Variable(tf.random.normal((num_rows, dim)))
    keys = iter(coordinator.create_per_worker_dataset(lambda: batches(tf, num_rows, batch, seed=0)))
    rates = {}
    for name, way in ways_of(tf, table).items():
        function = several(tf, way)

        def run(num: int, function: Any = function) -> None:
            for _ in range(num):
                coordinator.schedule(function, args=(keys,))
            coordinator.join()

        run(WARM_UP * workers)
        num = workers * max(1, steps // STEPS_AT_ONCE)
        began_s = time.monotonic()
        run(num)
        rates[name] = num * STEPS_AT_ONCE * batch / (time.monotonic() - began_s)
    return rates


def main() -> None:
    num_rows, dim, batch, workers, servers, steps = map(int, sys.argv[1:])
    addresses = free_addresses(workers + servers)
    cluster = {"worker": addresses[servers:], "ps": addresses[:servers]}
    start = multiprocessing.get_context("spawn")
    tasks = [(job, index) for job, members in cluster.items() for index in range(len(members))]
    processes = [start.Process(target=serve, args=(cluster, *task), daemon=True) for task in tasks]
    for process in processes:
        process.start()
    result = measure(tensorflow(), cluster, num_rows, dim, batch, steps)
    for process in processes:
        process.kill()
    print(json.dumps(result), flush=True)
    os._exit(0)  # a coordinator waits for its servers, which have been ended


if __name__ == "__main__":
    main()
