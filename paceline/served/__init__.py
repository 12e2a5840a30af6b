"""Federated rounds between a server and clients that come and go: both ends of the protocol, without a socket, a clock
or a thread."""
