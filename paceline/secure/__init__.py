"""Secure aggregation: a server learns the sum of clients' vectors, and no single one.

The protocol of Bonawitz et al., "Practical secure aggregation for privacy-preserving machine learning", CCS 2017
(figure 4, for a server that is curious but follows the protocol), on a graph in which a client shares secrets with some
neighbours rather than with all (SecAgg+: Bell et al., CCS 2020). Sans-IO: `Client` and `Server` take what has arrived
and give what is to be sent, stage by stage; whoever carries messages decides for how long a stage waits.

| stage | a client sends | the server answers |
|---|---|---|
| 1 | two public keys (`Client.advertise`) | the neighbours' ones (`Server.keys_for`) |
| 2 | shares of its secrets, each for one neighbour (`share`) | those for the client (`Server.shares_for`) |
| 3 | its vector under masks (`mask`) | whose vectors have arrived (`Server.arrived_for`) |
| 4 | for each neighbour the share of one of two secrets (`unmask`) | nothing: it knows the sum (`Server.total`) |

It needs the package `cryptography` (`pip install paceline[secure]`).
"""

from paceline.secure.client import Client, PublicKeys, Revealed
from paceline.secure.graph import Parties, neighbours, parties
from paceline.secure.quantising import Quantiser
from paceline.secure.secrets import SecureError
from paceline.secure.server import Server

__all__ = [
    "Client",
    "Parties",
    "PublicKeys",
    "Quantiser",
    "Revealed",
    "SecureError",
    "Server",
    "neighbours",
    "parties",
]
