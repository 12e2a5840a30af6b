"""Horovod's interface on Paceline's collectives, so that scripts that say `import horovod.torch as hvd` go on.

Nothing of Horovod is needed, and nothing is compiled. `paceline.horovod.torch` holds the names.
"""

from paceline.horovod.interactive import run

__version__ = "0.28.1"
"""The version of Horovod whose interface this is; scripts look at it."""

__all__ = ["run"]
