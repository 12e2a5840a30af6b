"""TensorFlow's distribution strategies, as names for Paceline's that do the same.

from paceline.compat.strategies import MirroredStrategy

strategy = MirroredStrategy(workers=2)
strategy.run(train)
"""

from paceline.compat.strategies.base import DistributionStrategy
from paceline.compat.strategies.cluster_resolver import Task, TFConfigClusterResolver
from paceline.compat.strategies.names import (
    CentralStorageStrategy,
    CommunicationOptions,
    MirroredStrategy,
    MultiWorkerMirroredStrategy,
    OneDeviceStrategy,
    ParameterServerStrategy,
)

__all__ = [
    "CentralStorageStrategy",
    "CommunicationOptions",
    "DistributionStrategy",
    "MirroredStrategy",
    "MultiWorkerMirroredStrategy",
    "OneDeviceStrategy",
    "ParameterServerStrategy",
    "TFConfigClusterResolver",
    "Task",
]
