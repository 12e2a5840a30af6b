"""Horovod on Ray: functions and classes on workers that can `hvd.init()`, on the cluster that the caller has joined.

Workers are Ray actors. They meet as torchrun's processes do, through a store on the first one's host.
"""

from paceline.horovod.ray.elastic import ElasticRayExecutor, RayHostDiscovery
from paceline.horovod.ray.runner import RayExecutor
from paceline.horovod.ray.worker import BaseHorovodWorker

__all__ = ["BaseHorovodWorker", "ElasticRayExecutor", "RayExecutor", "RayHostDiscovery"]
