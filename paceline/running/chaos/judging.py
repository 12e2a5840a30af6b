"""Whether a run that was struck has lost nothing, beside one that was not."""

import contextlib
import json
import os
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch

from paceline.checkpoint import FILE_NAME, Checkpoint
from paceline.engines import striking
from paceline.engines.ray.newcomers import CAME_TOO_LATE
from paceline.engines.striking import Strike
from paceline.records import EventRecord, read_records
from paceline.strategies.federated.clients import what_clients_keep
from paceline.strategies.traits import Traits
from paceline.training.pauses import MODEL_FILE
from paceline.training.row_tables import ROWS_FILE
from paceline.training.snapshot import read_model_file

_ROUNDING, _ROUNDING_OF_CLIENTS = 1e-3, 2e-2
"""Of models, as a share of their norm; and of what clients keep. That is made of gradients, which jump where an
activation does, so that rounding grows in it; of nine clients one whose part is lost is 0.3 away."""
_GRACE_S = 20.0
_OF_RAY = 2
"""So many descriptors Ray itself may have opened meanwhile, and closes again later."""
_LOSSES = ("lost", "server_lost", "not_joined")


def calls(folder: Path) -> dict[str, dict[str, int]]:
    """How often each process has come to each place."""
    found: dict[str, dict[str, int]] = defaultdict(dict)
    for path in sorted((folder / "calls").iterdir()):
        who, _, place = path.name.partition(" ")
        found[who][place] = path.stat().st_size
    return found


def losses(folder: Path, strikes: Sequence[Strike]) -> list[str]:
    """Whoever was struck and nobody else is to have been lost, unless it had left, or came too late to join. Nobody
    waits for a server that is silent before it has a copy: the run may end before that is noticed."""
    events = read_records(folder / "out", EventRecord)
    too_late = {event.who for event in events if event.name == "not_joined" and event.details["why"] == CAME_TOO_LATE}
    lost = {event.who for event in events if event.name in _LOSSES} - too_late
    gone = {event.who for event in events if event.name in ("given_up", "left")} | too_late
    has_copy = {event.who for event in events if event.name == "copied"}
    silent = {strike.who for strike in strikes if striking.KINDS[strike.kind].is_silent}
    gone |= silent & {event.who for event in events if event.name == "server_joined"} - has_copy
    struck = dying(folder, strikes)
    told = [f"{who} was lost, and not struck" for who in sorted(lost - struck)]
    return told + [f"{who} was struck, and its loss not noticed" for who in sorted(struck - lost - gone)]


def on_other_hosts(folder: Path) -> list[list[str]]:
    """Workers and servers of each host whose links are not the launcher's."""
    hosts: dict[str | None, list[str]] = defaultdict(list)
    for name in sorted(each.name for each in (folder / "networks").iterdir()):
        if not striking.is_of_launchers_host(folder, name):
            hosts[striking.network_of(folder, name)].append(name)
    return list(hosts.values())


def dying(folder: Path, strikes: Sequence[Strike]) -> set[str]:
    """Who does not outlive these."""
    return {who for strike in strikes if strike.is_deadly for who in _struck_with(folder, strike)}


def _struck_with(folder: Path, strike: Strike) -> set[str]:
    """Who is struck by it, besides whom it names."""
    if not striking.KINDS[strike.kind].is_of_host:
        return {strike.who}
    network = striking.network_of(folder, strike.who)
    names = (each.name for each in (folder / "networks").iterdir())
    return {name for name in names if striking.network_of(folder, name) == network}


def launcher(folder: Path, strikes: Sequence[Strike]) -> list[str]:
    """Another one is to have gone on, and what could not be written is to have been said."""
    told = (folder / "out" / "output.txt").read_text()
    words = {"kill": "the launcher was killed; another one goes on", "full": "what was there before is intact"}
    return [f"nothing says {words[each.kind]!r}" for each in strikes if words[each.kind] not in told]


def bound(traits: Traits, *, workers_die: bool) -> float:
    """How far the final model may be from the undisturbed run's: not at all where servers with copies die alone,
    rounding where updates keep their samples, and rounds their clients. Without lock-step other samples, or other
    parameters, are in each, a codec leaves out other parts of them, and what is no mean joins the gradients of fewer
    workers in another way: nothing is promised."""
    if traits.num_clients:
        return _ROUNDING
    is_coded = any(moved.codec is not None for moved in traits.traffic or ())
    joins_alike = traits.joins_by_mean or not workers_die
    if not (traits.lock_step and joins_alike) or is_coded:
        return float("inf")
    return 0.0 if traits.num_servers and not workers_die else _ROUNDING


def distance(folder: Path, whole: Path, *, has_clients: bool = False) -> float:
    """Of the final models, rows of tables among them, as a share of the undisturbed one's norm. Of layers that are
    clients' own the model has the mean of those that workers have in place, which counts in no verdict."""
    private = _of_clients(whole)[0] if has_clients else frozenset()
    models = (_model(each / "out") for each in (folder, whole))
    own, other = ({name: tensor for name, tensor in each.items() if name not in private} for each in models)
    return _distance(own, other)


def kept(folder: Path, whole: Path) -> list[str]:
    """Each client is to keep what it does in the undisturbed run, to rounding."""
    far = _distance(_of_clients(folder)[1], _of_clients(whole)[1])
    if far <= _ROUNDING_OF_CLIENTS:
        return []
    return [f"what clients keep is {far:.2g} from the undisturbed run's, and may be {_ROUNDING_OF_CLIENTS:g}"]


def _of_clients(folder: Path) -> tuple[frozenset[str], Mapping[str, torch.Tensor]]:
    content = (folder / "out" / FILE_NAME).read_bytes()
    return what_clients_keep([worker.own for worker in Checkpoint.decode(content, where=str(folder)).workers])


def _distance(own: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> float:
    """Tables have the rows that were trained on."""
    if {name: own[name].shape for name in own} != {name: other[name].shape for name in other}:
        return float("inf")
    pairs = [(own[name].double(), other[name].double()) for name in other if other[name].is_floating_point()]
    apart = sum(float((a - b).square().sum()) for a, b in pairs)
    norm = sum(float(b.square().sum()) for _, b in pairs)
    return float((torch.tensor(apart) / torch.tensor(norm)).sqrt()) if norm else apart


def _model(out: Path) -> dict[str, torch.Tensor]:
    rows = read_model_file(out / ROWS_FILE) if (out / ROWS_FILE).exists() else {}
    return {**read_model_file(out / MODEL_FILE), **rows}


def apart(distance: float, bound: float) -> list[str]:
    """That the final model is too far from the undisturbed run's; one that is not finite is, whatever the bound."""
    if distance <= bound:
        return []
    return [f"the model is {distance:.2g} from the undisturbed run's, and may be {bound:g}"]


def samples(folder: Path, whole: Path) -> list[str]:
    """Every sample is to count as often as in the undisturbed run, and every step alike on all workers."""
    steps, wrong = _committed(folder)
    counted, wanted = (_counted(each) for each in (steps, _committed(whole)[0]))
    differ = [sample for sample in wanted.keys() | counted.keys() if wanted[sample] != counted[sample]]
    if differ:
        first = min(differ)
        told = f"sample {first} counts {counted[first]} times, and {wanted[first]} times in the undisturbed run"
        wrong.append(f"{len(differ)} samples count otherwise: {told}")
    return wrong


def rounds(folder: Path, whole: Path) -> list[str]:
    """Every round is to be of as many clients, samples and batches as in the undisturbed run, and alike on all
    workers."""
    found, wrong = _committed(folder)
    wanted = _committed(whole)[0]
    for number in sorted(wanted.keys() | found.keys()):
        made_of, due = (_told(each.get(number, (0, 0, 0))) for each in (found, wanted))
        if made_of != due:
            wrong.append(f"round {number} is of {made_of}, and of {due} in the undisturbed run")
    return wrong


def _told(made_of: Sequence[int]) -> str:
    return "{} clients, {} samples and {} batches".format(*made_of)


def num_descriptors() -> int:
    """Of this process, but for Ray's: its connections are IPv6 sockets, of which it has another one to a node that has
    come anew, and it waits for events. What a run leaves has memory, a pipe, a file or an IPv4 socket besides."""
    return sum(map(_is_of_runs, os.listdir("/proc/self/fd"))) - len(psutil.Process().net_connections("tcp6"))


def _is_of_runs(descriptor: str) -> bool:
    with contextlib.suppress(FileNotFoundError):  # closed meanwhile
        return not os.readlink(f"/proc/self/fd/{descriptor}").startswith("anon_inode:")
    return False


def left(folder: Path, num_before: int) -> list[str]:
    """Processes of the run that go on, and descriptors that this one holds since: memory that workers share has no
    name, and goes with whoever has it open."""
    found: list[str] = []
    if not _becomes(lambda: not _processes(folder)):
        found.append(f"processes are left: {_processes(folder)}")
    if not _becomes(lambda: num_descriptors() <= num_before + _OF_RAY):
        found.append(f"{num_descriptors() - num_before} descriptors more are open than before the run")
    return found


def _processes(folder: Path) -> list[int]:
    """Those whose environment names the run, and in which something of it runs: Ray may keep one for a while that it
    has started for a worker that was given up meanwhile."""
    mark = f"{striking.VARIABLE}={folder.resolve()}".encode()
    found = []
    for each in Path("/proc").glob("[0-9]*"):
        try:
            is_of_run = mark in (each / "environ").read_bytes().split(b"\0")
            command = (each / "cmdline").read_bytes()
            if is_of_run and not command.startswith(b"ray::IDLE") and b"default_worker.py" not in command:
                found.append(int(each.name))
        except OSError:  # it has ended, or is another user's
            continue
    return found


def _committed(folder: Path) -> tuple[dict[int, Any], list[str]]:
    """What each step was made of, and where workers differ in it, or in what all are to have alike."""
    steps: dict[int, Any] = {}
    models: dict[int, str] = {}
    wrong = []
    for path in sorted((folder / "committed").iterdir()):
        for line in path.read_text().splitlines(keepends=True):
            if not line.endswith("\n"):  # it died as it wrote; others have it, too
                continue
            number, parts, model = json.loads(line)
            if steps.setdefault(number, parts) != parts:
                wrong.append(f"{path.name} has other samples in step {number}")
            if models.setdefault(number, model) != model:
                wrong.append(f"{path.name} has another model at step {number}")
    return steps, wrong


def _counted(steps: dict[int, Any]) -> Counter[str]:
    return Counter(str(sample) for parts in steps.values() for sample in parts)


def _becomes(is_so: Callable[[], bool]) -> bool:
    until_s = time.monotonic() + _GRACE_S
    while not is_so():
        if time.monotonic() > until_s:
            return False
        time.sleep(0.1)
    return True
