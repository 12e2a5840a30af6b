"""The same for scripts that import `pytorch_lightning`, whose base classes are not those of `lightning.pytorch`."""

from lightning_fabric.plugins.environments import ClusterEnvironment
from pytorch_lightning.callbacks import Callback
from pytorch_lightning.strategies import ParallelStrategy

from paceline.lightning.environment import EnvironmentBody
from paceline.lightning.strategy import StrategyBody


class PacelineEnvironment(EnvironmentBody, ClusterEnvironment):  # type: ignore[misc]
    __doc__ = EnvironmentBody.__doc__


class PacelineStrategy(StrategyBody, ParallelStrategy):  # type: ignore[misc]
    __doc__ = StrategyBody.__doc__
    environment = PacelineEnvironment
    callback = Callback


__all__ = ["PacelineEnvironment", "PacelineStrategy"]
