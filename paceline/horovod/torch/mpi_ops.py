"""The module from which some of Horovod's scripts import its operations by their names."""

from paceline.horovod.torch import *  # noqa: F403  # all names of the interface, and nothing else
