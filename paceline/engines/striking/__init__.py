"""Strikes a process of a chaos run, by a signal or by what it lacks, at a drawn place of the protocol.

Outside such runs nothing is done here.
"""

from paceline.engines.striking.arming import VARIABLE, Place, Places, Strike, arm, is_of_launchers_host, met, network_of
from paceline.engines.striking.kinds import KINDS, Kind, kinds_of
from paceline.engines.striking.servers import SERVERS, arm_server
from paceline.engines.striking.sizes import Sizes

__all__ = [
    "KINDS",
    "SERVERS",
    "VARIABLE",
    "Kind",
    "Place",
    "Places",
    "Sizes",
    "Strike",
    "arm",
    "arm_server",
    "is_of_launchers_host",
    "kinds_of",
    "met",
    "network_of",
]
