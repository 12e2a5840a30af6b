"""A store whose servers are actors of the Ray cluster that this program is connected to."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ray

from paceline.comm.wire import Keys
from paceline.engines.ray.nodes import own_address
from paceline.errors import UsageError
from paceline.kv.serving import Group, Server
from paceline.kv.spec import Spec


class _Actor:
    def __init__(self, spec: Spec, index: int, keys: Keys) -> None:
        self._server = Server(spec, index, keys, host=own_address())

    def endpoint(self) -> str:
        return self._server.endpoint

    def serve(self) -> None:
        self._server.serve()

    def stop(self) -> None:
        self._server.stop()


@contextmanager
def serve_on_ray(spec: Spec) -> Iterator[Group]:
    """A store with a server each in actors, spread over the cluster's nodes, until the block ends. Tasks and actors
    that get the group as an argument can be its workers. Raises UsageError as `serve`, and if there is no Ray."""
    if not ray.is_initialized():
        raise UsageError("this program is not connected to Ray: call ray.init() first")
    keys = Keys.generate()
    kind: Any = ray.remote(_Actor).options(max_concurrency=2, num_cpus=0, scheduling_strategy="SPREAD")
    servers = [kind.remote(spec, index, keys) for index in range(spec.servers)]
    try:
        endpoints = tuple(ray.get([server.endpoint.remote() for server in servers]))
        serving = [server.serve.remote() for server in servers]
        yield Group(spec, keys, endpoints)
        ray.get([server.stop.remote() for server in servers])
        ray.get(serving)
    except ray.exceptions.ActorDiedError as error:
        raise UsageError(f"a store's server cannot be had: {error}") from None
    finally:
        for server in servers:
            ray.kill(server)
