"""Lightning's Trainer under Paceline's strategies: `Trainer(strategy=PacelineStrategy())` in a script that
`paceline run` starts. Scripts that import `pytorch_lightning` take both classes from
`paceline.lightning.pytorch_lightning`. Nothing else in Paceline imports them.
"""

from lightning.fabric.plugins.environments import ClusterEnvironment
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import ParallelStrategy

from paceline.lightning.environment import EnvironmentBody
from paceline.lightning.strategy import StrategyBody


class PacelineEnvironment(EnvironmentBody, ClusterEnvironment):  # type: ignore[misc]
    __doc__ = EnvironmentBody.__doc__


class PacelineStrategy(StrategyBody, ParallelStrategy):  # type: ignore[misc]
    __doc__ = StrategyBody.__doc__
    environment = PacelineEnvironment
    callback = Callback


__all__ = ["PacelineEnvironment", "PacelineStrategy"]
