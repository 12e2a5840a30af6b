"""One worker's process."""

import os
import queue
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import ray

from paceline.engines import aliases
from paceline.engines.ray.nodes import own_address, own_node_id
from paceline.horovod import line as lines
from paceline.horovod import reporting, runtime
from paceline.horovod.ray import ray_logger


@final
class ActorLine(lines.Line):
    """A worker's line to the caller, who comes for its messages."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: queue.Queue[dict[str, Any]] = queue.Queue()
        self._places: queue.Queue[dict[str, Any]] = queue.Queue()

    def hear(self, message: dict[str, Any]) -> None:
        if message.pop("kind") == "enter":
            self._places.put(message)
        else:
            self.heard(**message)

    def say(self, kind: str, **values: Any) -> None:
        self.messages.put({"kind": kind, **values})

    def _ask(self, mine: Mapping[str, Any]) -> dict[str, Any]:
        self.say("ask", mine=dict(mine))
        return self._places.get()


class BaseHorovodWorker:
    """A Ray actor that calls functions, and holds the caller's object, if there is one."""

    executable: Any = None

    def __init__(self, world_rank: int = 0, world_size: int = 1) -> None:
        aliases.install([*aliases.ALIASES])
        self._line = ActorLine()
        place = {"HOROVOD_HOSTNAME": own_node_id(), "HOROVOD_RANK": world_rank, "HOROVOD_SIZE": world_size}
        self.update_env_vars(place)

    def node_id(self) -> str:
        return own_node_id()

    def hostname(self) -> str:
        return socket.gethostname()

    def get_gpu_ids(self) -> list[Any]:
        """The GPUs that Ray has given this worker."""
        return list(ray.get_gpu_ids())

    def meeting_point(self) -> tuple[str, int]:
        """This host's address, and a port that nobody listens on now."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return own_address(), probe.getsockname()[1]

    def update_env_vars(self, env_vars: Mapping[str, Any]) -> None:
        os.environ.update({name: str(value) for name, value in env_vars.items()})

    def env_vars(self) -> dict[str, str]:
        return dict(os.environ)

    def start_executable(
        self,
        executable_cls: type | None = None,
        executable_args: Sequence[Any] | None = None,
        executable_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        """Make the object that functions are given."""
        if executable_cls is not None:
            self.executable = executable_cls(*(executable_args or ()), **(executable_kwargs or {}))

    def set_queue(self, queue: Any) -> None:
        """Where `ray_logger.log` sends what it is given."""
        ray_logger.configure(queue)

    def execute(self, func: Callable[[Any], Any]) -> Any:
        """Call a function with the object."""
        return func(self.executable)

    def work(self, func: Callable[[Any], Any]) -> Any:
        """Call a function with the object, as a worker of an elastic job, whose steps are recorded."""
        lines.connect(self._line)
        reporter = reporting.report_over(self._line)
        try:
            result = func(self.executable)
            runtime.end()
            return result
        finally:
            reporter.send()
            self._line.say("over")

    def message(self) -> dict[str, Any]:
        """What an elastic job's worker says next; the last is that it is over."""
        return self._line.messages.get()

    def hear(self, message: dict[str, Any]) -> None:
        """What the caller tells an elastic job's worker."""
        self._line.hear(message)

    def leave(self) -> None:
        """The process ends next: let go of what it shares with the others."""
        self.executable = None
        runtime.end()
