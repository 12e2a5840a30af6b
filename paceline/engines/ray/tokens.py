"""Ray's token, without which a cluster takes no work: made for a Ray that is started here, asked of every other."""

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from typing import Any

from ray._private.services import canonicalize_bootstrap_address
from ray._raylet import (
    AuthenticationMode,
    AuthenticationTokenLoader,
    Config,
    GcsClient,
    get_authentication_mode,
)
from ray.exceptions import AuthenticationError, RayError

from paceline.errors import UsageError

_MODE, _TOKEN, _FILE = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"
_TOKEN_BYTES = 32
_NO_CLUSTER = "0" * 56  # an id that no cluster has; a client that is given none logs what becomes of asking for it
_ASK_S = 5.0
_CLIENT = "ray://"


@contextmanager
def own_token() -> Iterator[None]:
    """A token of its own for a Ray that is started inside; its processes inherit it."""
    with _environment({_MODE: "token", _TOKEN: secrets.token_hex(_TOKEN_BYTES)}):
        yield


@contextmanager
def jobs_token() -> Iterator[None]:
    """The token that a job's environment gives to all of its hosts, where these share nothing else.

    Raises:
        UsageError: it gives none, or one that can be guessed.
    """
    if len(os.environ.get(_TOKEN, "")) < _TOKEN_BYTES:
        raise UsageError(
            "the job's hosts start by themselves and need a secret that they share: give the job the environment "
            f"variable {_TOKEN} of {_TOKEN_BYTES} letters or more, such as Python's secrets.token_hex(32)"
        )
    with _environment({_MODE: "token"}):
        yield


@contextmanager
def users_token(address: str, *, insecure: bool) -> Iterator[None]:
    """Ray uses the user's token for the cluster that is connected to inside; one that asks for none gets none.

    Raises:
        UsageError: the cluster takes work from anybody, and this is not said to be right; or the user has no token, or
            another, which the message finds.
        ConnectionError: `auto` finds no cluster, or what is there does not answer as one.
    """
    if _is_refused(address, mode="disabled"):
        with _environment({_MODE: "token"}):
            has_token = False
            with suppress(AuthenticationError):
                has_token = AuthenticationTokenLoader.instance().has_token()
            if not has_token or _is_refused(address, mode="token"):
                raise UsageError(
                    f"Ray at {address} wants the token that it was started with, and here is "
                    f"{'another' if has_token else 'none'}, {_source()}; bring there the one of its first machine, as "
                    "docs/cluster.md shows"
                )
            yield
        return
    _require_consent(address, insecure=insecure)
    yield


def require_token_mode(address: str, *, insecure: bool) -> None:
    """
    Raises:
        UsageError: this process is connected without a token, and this is not said to be right.
    """
    if get_authentication_mode() != AuthenticationMode.TOKEN:
        _require_consent(address, insecure=insecure)


def _require_consent(address: str, *, insecure: bool) -> None:
    if not insecure:
        raise UsageError(
            f"Ray at {address} asks for no token: whoever reaches it can run programs on it. Start it with a token, as "
            "docs/cluster.md shows, or say --insecure (insecure=True in Python)"
        )


def _source() -> str:
    """Where Ray looks for the user's token: in the first of three places that says anything."""
    if os.environ.get(_TOKEN):
        return f"in the variable {_TOKEN}"
    named = os.environ.get(_FILE)
    return f"in the file {named} that {_FILE} names" if named else "in the file ~/.ray/auth_token"


def _is_refused(address: str, *, mode: str) -> bool:
    """Whether the cluster refuses a question for its token. Once Ray is connected, its threads need theirs. Raises
    ConnectionError if no cluster answers."""
    with _environment({_MODE: mode}):
        if address.startswith(_CLIENT):
            return _is_client_refused(address.removeprefix(_CLIENT))
        client = GcsClient(address=canonicalize_bootstrap_address(address), cluster_id=_NO_CLUSTER)
        try:
            client.internal_kv_exists(b"", namespace=b"", timeout=_ASK_S)
        except AuthenticationError as error:  # also where it has an id, and not that of no cluster
            return "InvalidAuthToken" in str(error)
        except RayError as error:
            raise ConnectionError(f"no cluster answers there ({error})") from error
    return False


def _is_client_refused(target: str) -> bool:
    """The same of the server of Ray's client, which has a protocol of its own."""
    grpc: Any = import_module("grpc")  # which Ray's client alone needs
    asking: Any = import_module("ray._private.grpc_utils")
    messages: Any = import_module("ray.core.generated.ray_client_pb2")
    stubs: Any = import_module("ray.core.generated.ray_client_pb2_grpc")
    channel = asking.init_grpc_channel(target, asynchronous=False)
    try:
        question = messages.ClusterInfoRequest(type=messages.ClusterInfoType.PING)
        stubs.RayletDriverStub(channel).ClusterInfo(question, timeout=_ASK_S, metadata=[("client_id", _NO_CLUSTER)])
    except grpc.RpcError as error:
        if error.code() is not grpc.StatusCode.UNAUTHENTICATED:
            why = error.details() or error.code().name
            raise ConnectionError(f"Ray's client gets no answer from {target}: {why}") from error
        return True
    finally:
        channel.close()
    return False


@contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    """Ray reads mode and token once a process, so it is told to read them again."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    _read_again()
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
        _read_again()


def _read_again() -> None:
    Config.initialize("")  # first: a thread of Ray's that still runs would look for a token that is gone
    AuthenticationTokenLoader.instance().reset_cache()
