"""Loops in JAX and Keras train alike on two workers and in one process; TensorFlow's arrays are exchanged as such.

TensorFlow has an environment of its own (tests/apart.py).
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline import Result
from paceline.data import load
from tests import apart
from tests.distributed.harness import COLD, PACELINE, SCRIPTS
from tests.distributed.scripts.side_by_side import LR, global_batches

RECIPES = Path(__file__).parents[2] / "recipes" / "other_frameworks"
CLOSE = {"atol": 1e-5, "rtol": 0.0}
EVERY, EPOCHS, GLOBAL_BATCH = 4, 2, 256  # ten steps, of which JAX traces each anew

pytestmark = [
    pytest.mark.slow,
    pytest.mark.ray,
    pytest.mark.usefixtures("forked_programs", "on_cluster"),
    pytest.mark.skipif(find_spec("jax") is None, reason="JAX is not installed (paceline[frameworks])"),
]
needs_keras = pytest.mark.skipif(find_spec("keras") is None, reason="Keras is not installed (paceline[frameworks])")
TENSORFLOW = apart.python_of("tensorflow")
needs_tensorflow = pytest.mark.skipif(
    TENSORFLOW is None, reason="there is no TensorFlow: `python tests/apart.py tensorflow`, or `make test-slow`"
)
loads_for_minutes = pytest.mark.timeout(1300)  # where others have the cores
tensorflow = pytest.param("tensorflow", marks=[needs_tensorflow, loads_for_minutes])
backends = pytest.mark.parametrize("backend", ["torch", "jax", tensorflow])


def ran(script: Path, *options: str, workers: int, backend: str = "jax", cwd: Path) -> str:
    """What it says. What uses TensorFlow starts cold, and in a Ray of its own."""
    python, paceline, environment = ["python"], ["paceline"], {**os.environ, "KERAS_BACKEND": backend}
    if backend == "tensorflow":
        assert TENSORFLOW is not None
        python, paceline = [TENSORFLOW], [TENSORFLOW, PACELINE]
        environment |= {"TF_CPP_MIN_LOG_LEVEL": "3", "RAY_ADDRESS": "", **COLD}
        # TensorFlow writes sources there, which workers do not live to remove. Ray's sockets need a short path.
        environment |= {"TMPDIR": str(cwd), "RAY_TMPDIR": tempfile.gettempdir()}
    settings = ["--strategy", "all-reduce", "--workers", str(workers), "--env", "KERAS_BACKEND"]
    launched = [*paceline, "run", str(script), *settings, "--"]
    command = launched if workers > 1 else [*python, str(script)]
    done = subprocess.run(
        [*command, *options], env=environment, cwd=cwd, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def trained(script: str, *options: str, workers: int, backend: str = "jax", cwd: Path) -> list[Any]:
    """The model's arrays."""
    path = cwd / f"{workers}.npz"
    own = ["--epochs", str(EPOCHS), "--global-batch", str(GLOBAL_BATCH), "--save", str(path), *options]
    ran(RECIPES / script, *own, workers=workers, backend=backend, cwd=cwd)
    return arrays_in(path)


def arrays_in(path: Path) -> list[Any]:
    with np.load(path) as saved:
        return [saved[name] for name in saved.files]


def assert_close(actual: list[Any], expected: list[Any]) -> None:
    assert len(actual) == len(expected)
    for one, other in zip(actual, expected, strict=True):
        np.testing.assert_allclose(one, other, **CLOSE)


def test_gradients_of_two_workers_in_jax_are_those_of_one_process(tmp_path: Path) -> None:
    assert_close(*(trained("jax_mnist.py", workers=workers, cwd=tmp_path) for workers in (2, 1)))


def test_the_runs_budget_ends_a_loop_in_jax_and_its_steps_are_recorded(tmp_path: Path) -> None:
    own = ["--out", str(tmp_path / "run"), "--max-steps", "5", "--", "--global-batch", str(GLOBAL_BATCH)]
    command = ["paceline", "run", str(RECIPES / "jax_mnist.py"), "--workers", "2", *own, "--dataset", "digits"]
    subprocess.run(command, cwd=tmp_path, check=True, timeout=600)
    steps = Result.open(tmp_path / "run").steps
    assert [record.step for record in steps if record.worker == 1] == [1, 2, 3, 4, 5]
    assert {record.samples for record in steps} == {GLOBAL_BATCH // 2}


@needs_keras
@backends
def test_gradients_of_two_workers_in_keras_are_those_of_one_process(backend: str, tmp_path: Path) -> None:
    assert_close(*(trained("keras_mnist.py", workers=w, backend=backend, cwd=tmp_path) for w in (2, 1)))


ARRAYS = """
import numpy as np, paceline, tensorflow as tf, torch
from paceline.errors import UsageError

worker = paceline.init()


def tree(own):
    return {
        "weights": [tf.fill((3, 2), own), tf.constant(own, tf.float64), tf.fill((5,), 2 * own)],
        "half": tf.cast(tf.fill((5,), own), tf.bfloat16),
        "steps": (tf.fill((2,), int(8 * own)), None),
        "none": tf.zeros((0, 3)),
        "others": [np.full(2, own), torch.full((2,), own)],
    }


def places(found):
    first, _, last = found["weights"]
    return [np.asarray(memoryview(each)).__array_interface__["data"][0] for each in (first, last)]


def assert_same(found, wanted):
    for one, other in zip(tf.nest.flatten(found), tf.nest.flatten(wanted), strict=True):
        assert type(one) is type(other), (type(one), type(other))
        if other is not None:
            assert (one.dtype, tuple(one.shape)) == (other.dtype, tuple(other.shape))
            np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


own = tree(float(worker.rank + 1))
assert_same(worker.all_reduce_tree(own), tree(1.5))
total = worker.all_reduce_tree(own, "sum")
assert_same(total, tree(3.0))
first, last = places(total)
assert last - first == 64, "TensorFlow has taken over the memory in which they travelled, one behind the other"
assert_same(own, tree(float(worker.rank + 1)))
from_last = worker.broadcast_tree({**own, "flag": tf.constant([worker.rank == 1])}, root=1)
assert_same(from_last, {**tree(2.0), "flag": tf.constant([True])})
refused = [tf.Variable(1.0), tf.constant("text"), tf.RaggedTensor.from_row_splits([1.0, 2.0], [0, 2])]
for leaf, said in zip(refused, ("Variable is no eager", "arrays of string", "RaggedTensor is no eager"), strict=True):
    try:
        worker.all_reduce_tree({"x": leaf})
        raise AssertionError(leaf)
    except UsageError as error:
        assert "tree['x']" in str(error) and said in str(error), error
print("exchanged", worker.size)
"""


@needs_tensorflow
@loads_for_minutes
def test_tensorflow_s_arrays_come_back_as_such(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(ARRAYS)
    said = ran(script, workers=2, backend="tensorflow", cwd=tmp_path)
    assert said.count("exchanged 2") == 2


def test_local_updates_in_jax_are_those_of_two_models_side_by_side(tmp_path: Path) -> None:
    import jax

    from recipes.other_frameworks import jax_mnist as recipe

    data = load("digits")
    x, y = data.train[:][0].flatten(1).numpy(), data.train[:][1].numpy()
    both = [recipe.initial(x.shape[1], data.num_classes)] * 2
    velocities = [jax.tree.map(np.zeros_like, both[0])] * 2
    steps = global_batches(len(x), epochs=EPOCHS, global_batch=GLOBAL_BATCH)
    for number, batches in enumerate(steps, 1):
        for rank, own in enumerate(batches):
            gradient = jax.grad(recipe.loss)(both[rank], x[own], y[own])
            both[rank], velocities[rank] = recipe.update(both[rank], velocities[rank], gradient, LR, 0.9)
        if number % EVERY == 0:
            both = [jax.tree.map(lambda one, other: (one + other) / 2, *both)] * 2
    mean = jax.tree.map(lambda one, other: (one + other) / 2, *both)
    actual = trained("jax_mnist.py", "--every", str(EVERY), workers=2, cwd=tmp_path)
    assert_close(actual, [np.asarray(leaf) for leaf in jax.tree.leaves(mean)])


@needs_keras
@pytest.mark.parametrize("backend", ["torch", "jax"])  # TensorFlow has its own steps above, and its averages below
def test_local_updates_in_keras_are_those_of_two_models_side_by_side(backend: str, tmp_path: Path) -> None:
    path = tmp_path / "side-by-side.npz"
    settings = [str(EVERY), str(EPOCHS), str(GLOBAL_BATCH), str(path)]
    ran(SCRIPTS / "side_by_side.py", *settings, workers=1, backend=backend, cwd=tmp_path)
    found = trained("keras_mnist.py", "--every", str(EVERY), workers=2, backend=backend, cwd=tmp_path)
    assert_close(found, arrays_in(path))


FIT = """
import keras, numpy as np, paceline
from paceline.compat.keras import Averaging
worker = paceline.init()
rng = np.random.default_rng(0)
x, y = rng.normal(size=(96, 8)).astype("float32"), rng.normal(size=(96, 2)).astype("float32")
keras.utils.set_random_seed(worker.rank)  # all begin with the first one's
layers = keras.layers
model = keras.Sequential(
    [keras.Input((8,)), layers.Dense(5, "tanh"), layers.BatchNormalization(trainable=False), layers.Dense(2)]
)
model.compile(keras.optimizers.SGD(0.1), "mse")
own = slice(worker.rank, {stop}, worker.size)
batch_size, meeting = 16 // worker.size, [Averaging(worker)]
model.fit(x[own], y[own], batch_size=batch_size, epochs=3, shuffle=False, verbose=0, callbacks=meeting)
if worker.rank == 0:
    np.savez({path!r} + str(worker.size), *model.get_weights())
"""


@needs_keras
@backends
def test_fit_with_models_that_meet_at_each_batch_is_synchronous(backend: str, tmp_path: Path) -> None:
    script, path = tmp_path / "script.py", str(tmp_path / "weights-")
    script.write_text(FIT.format(path=path, stop=None))
    found = []
    for workers in (2, 1):
        ran(script, workers=workers, backend=backend, cwd=tmp_path)
        found.append(arrays_in(Path(f"{path}{workers}.npz")))
    assert_close(*found)


@needs_keras
def test_fit_with_other_numbers_of_batches_is_refused(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(FIT.format(path="none", stop="96 if worker.rank else 48"))
    with pytest.raises(AssertionError, match="by rank, 3 batches in each of 3 epochs, 6 batches in each of 3 epochs"):
        ran(script, workers=2, cwd=tmp_path)


STOPPING = """
import keras, numpy as np, paceline
from paceline.compat.keras import Averaging
worker = paceline.init()

class Stop(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        self.model.stop_training = worker.rank == 1 and epoch == 1

x, y = np.ones((32, 4), "float32"), np.ones((32, 1), "float32")
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
model.compile("sgd", "mse", steps_per_execution=2)
history = model.fit(x, y, batch_size=4, epochs=9, verbose=0, callbacks=[Stop(), Averaging(worker, every=3)])
print("epochs", len(history.epoch))
assert len({str(weights) for weights in worker.all_gather_object([w.tolist() for w in model.get_weights()])}) == 1
"""


@needs_keras
def test_all_stop_where_one_stops_early(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(STOPPING)
    said = ran(script, workers=2, cwd=tmp_path)
    assert [line.split("epochs ")[1] for line in said.splitlines() if "epochs " in line] == ["2", "2"]
