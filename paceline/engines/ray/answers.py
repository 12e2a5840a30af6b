"""What a run answers to commands from another terminal, and what it has been asked for."""

from collections.abc import Callable, Mapping
from typing import Any, final

from paceline.elastic import Elastic
from paceline.engines.ray.new_servers import NewServers
from paceline.engines.ray.newcomers import Newcomers, require_allowed
from paceline.engines.standing import Progress
from paceline.errors import UsageError


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
        self._wanted: int | None = None  # workers that were asked for before any could come

    def stop(self) -> None:
        """The run is to save itself and to end."""
        self.is_asked_to_stop = True

    def scale_by(self, newcomers: Newcomers, new_servers: NewServers | None) -> None:
        """Workers come and leave, and servers come, by these from here on; none: no server can. Raises UsageError if
        the number of workers that was asked for before cannot be had."""
        self._newcomers, self._new_servers = newcomers, new_servers
        if self._wanted is not None:
            newcomers.scale(self._wanted)

    def __call__(self, request: Mapping[str, Any]) -> str:
        """What is said to this request. Raises UsageError where it cannot be had."""
        match request.get("do"):
            case "stop":
                self.stop()
                return "the run saves itself, and ends"
            case "progress":
                return self._progress().to_json()
            case "scale":
                asked = {"workers": self._scale, "servers": self._scale_servers}
                return "; ".join(scale(request[what]) for what, scale in asked.items() if request.get(what) is not None)
            case unknown:
                raise UsageError(f"this run does not know what {unknown!r} is")

    def _scale(self, wanted: object) -> str:
        if not isinstance(wanted, int):
            raise UsageError(f"{wanted!r} is no number of workers")
        self._require_elastic("workers")
        assert self._elastic is not None
        if self._newcomers is not None:
            return self._newcomers.scale(wanted)
        require_allowed(self._elastic, wanted)
        self._wanted = wanted
        return f"the run starts; there are to be {wanted} workers once it trains"

    def _scale_servers(self, wanted: object) -> str:
        if not isinstance(wanted, int):
            raise UsageError(f"{wanted!r} is no number of servers")
        self._require_elastic("servers")
        if self._newcomers is None:
            raise UsageError("the run has yet to start; ask for more servers once it trains")
        if self._new_servers is None:
            raise UsageError(
                "no key range of this run can come to another server, since servers have no replicas; start it with "
                "--strategy ps-bsp, ps-ssp or ps-asp, --option servers=2 (or more) and --option replicas=1"
            )
        return self._new_servers.scale(wanted)

    def _require_elastic(self, what: str) -> None:
        if self._elastic is None:
            raise UsageError(
                f"the run was started without --elastic MIN:MAX, so that its number of {what} stays as it is"
            )
