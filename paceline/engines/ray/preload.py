"""What a process of Ray's loads while Ray still starts, by importing this module: all that a member of a run needs."""

import importlib

from paceline.loading import uncollected

with uncollected():
    importlib.import_module("paceline.engines.ray.worker_actor")
    importlib.import_module("paceline.training.worker")  # which the worker loads as its script begins
