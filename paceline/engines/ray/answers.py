"""What a run answers to commands from another terminal, and what it has been asked for."""

from collections.abc import Callable, Mapping
from typing import Any, final

from paceline.elastic import Elastic
from paceline.engines.ray.new_servers import NewServers
from paceline.engines.ray.newcomers import Newcomers, require_allowed
from paceline.engines.standing import Progress
from paceline.errors import UsageError

_SCALED = ("workers", "servers")


@final
class Answers:
    """Answers `paceline stop`, `attach` and `scale`.

    Args:
        elastic: how many workers the run may have; none: it keeps those that it has.
        progress: says how far the run is.
    """

    def __init__(self, elastic: Elastic | None, progress: Callable[[], Progress]) -> None:
        self._elastic, self._progress = elastic, progress
        self.is_asked_to_stop = False
        self._newcomers: Newcomers | None = None
        self._new_servers: NewServers | None = None
        self._wanted: dict[str, int] = {}  # workers and servers that were asked for before any could come

    def stop(self) -> None:
        """The run is to save itself and to end."""
        self.is_asked_to_stop = True

    def scale_by(self, newcomers: Newcomers, new_servers: NewServers | None) -> None:
        """Workers come and leave, and servers come, by these from here on; none: no server can. Raises UsageError if
        what was asked for before cannot be had."""
        self._newcomers, self._new_servers = newcomers, new_servers
        self._scale(self._wanted)

    def __call__(self, request: Mapping[str, Any]) -> str:
        """What is said to this request. Raises UsageError where it cannot be had."""
        match request.get("do"):
            case "stop":
                self.stop()
                return "the run saves itself, and ends"
            case "progress":
                return self._progress().to_json()
            case "scale":
                return self._scale({what: request[what] for what in _SCALED if request.get(what) is not None})
            case unknown:
                raise UsageError(f"this run does not know what {unknown!r} is")

    def _scale(self, wanted: Mapping[str, Any]) -> str:
        """Have so many of each kind. Raises UsageError for the first that cannot be had."""
        for what, number in wanted.items():
            if not isinstance(number, int):
                raise UsageError(f"{number!r} is no number of {what}")
            if self._elastic is None:
                raise UsageError(
                    f"the run was started without --elastic MIN:MAX, so that its number of {what} stays as it is"
                )
        if "workers" in wanted and self._elastic is not None:
            require_allowed(self._elastic, wanted["workers"])
        if self._newcomers is None:
            return self._remembered(wanted)
        if "servers" in wanted:
            self._servers().require_allowed(wanted["servers"])
        told = [self._servers().scale(wanted["servers"])] if "servers" in wanted else []
        return "; ".join(told + ([self._newcomers.scale(wanted["workers"])] if "workers" in wanted else []))

    def _remembered(self, wanted: Mapping[str, int]) -> str:
        self._wanted.update(wanted)
        numbers = " and ".join(f"{number} {what}" for what, number in wanted.items())
        return f"the run starts; there are to be {numbers} once it trains"

    def _servers(self) -> NewServers:
        if self._new_servers is None:
            raise UsageError(
                "no key range of this run can come to another server, since servers have no replicas; start it with "
                "--strategy ps-bsp, ps-ssp or ps-asp, --option servers=2 (or more) and --option replicas=1"
            )
        return self._new_servers
