"""Whether each gradient counts once on servers of a run that was struck, and each sample with them."""

import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from paceline.engines.striking import Strike
from paceline.records import EventRecord, UpdateRecord, read_records
from paceline.running.chaos import counts, judging
from paceline.running.chaos.counts import Gradient
from paceline.running.result import Result
from paceline.strategies.traits import Unit


class _Copy(NamedTuple):
    """A part of the model, as one server has it."""

    server: str
    key_range: int
    shard: int

    def told(self, gradient: Gradient, times: int) -> str:
        worker, clock = gradient
        return f"gradient {clock} of worker {worker} counts {times} times in key range {self.key_range}"


_Copies = Mapping[_Copy, Counter[Gradient]]


def counted_alike(folder: Path, whole: Path, strikes: Sequence[Strike]) -> list[str]:
    """Each copy that is left is to be made of all gradients of the undisturbed run, each once."""
    wanted: dict[tuple[int, int], set[Gradient]] = defaultdict(set)
    for copy, counted in _copies(whole, whole, ()).items():
        wanted[copy.key_range, copy.shard] |= counted.keys()
    copies = _copies(folder, whole, strikes)
    due = {copy: wanted[copy.key_range, copy.shard] for copy in copies}
    return _not_given(folder, strikes) + _otherwise(copies, due)


def of_samples(folder: Path, whole: Path, strikes: Sequence[Strike], *, unit: Unit, keeps: bool) -> list[str]:
    """Where workers may die, too, each copy that is left is to be made of the same gradients, each once, and these of
    each sample as often as in the undisturbed run, or of fewer where the run says that nobody was left to train on
    them; and there are as many updates as follows, or, if updates keep their samples, as in the undisturbed run."""
    copies, of_whole = _copies(folder, whole, strikes), _copies(whole, whole, ())
    gradients = set[Gradient]().union(*copies.values())
    wrong = _not_given(folder, strikes) + _otherwise(copies, dict.fromkeys(copies, gradients))
    counting = {copy.key_range for copy, counted in copies.items() if counted}
    for key_range in sorted({copy.key_range for copy in of_whole} - counting):
        wrong.append(f"nothing counts in key range {key_range} on any server that is left")
    pushed = _pushed(folder)
    for worker, clock in sorted(gradients - pushed.keys()):
        wrong.append(f"gradient {clock} of worker {worker} counts, and was not pushed")
    wanted = _samples(_pushed(whole), set[Gradient]().union(*of_whole.values()))
    wrong += _otherwise_often(folder, _samples(pushed, gradients), wanted)
    number = Result(folder / "out").iteration
    least, most = _num_updates(gradients, unit)
    if keeps:
        least = most = Result(whole / "out").iteration
    if not least <= number <= most:
        wrong.append(f"there are {number} updates of {len(gradients)} gradients; {least} to {most} are right")
    return wrong


def _num_updates(gradients: set[Gradient], unit: Unit) -> tuple[int, int]:
    """How many updates these may make, at least and at most: each is one, or each update is of one gradient of each
    worker at most."""
    number, num_workers = len(gradients), len({worker for worker, _ in gradients})
    return (number if unit == "gradient" else math.ceil(number / max(1, num_workers))), number


def of_steps(folder: Path, whole: Path) -> list[str]:
    """Where workers have models of their own and no step in common, all that those who are there have done counts, and
    of whoever is gone as many of its first steps as the run says that others had: so each sample counts as often as in
    the undisturbed run. Iterations may be more, since others had heard of gradients that are lost with a model."""
    gone = {event.who: event.details["steps"] for event in _events(folder, "let_go")}
    pushed = _pushed(folder)
    counted = {(worker, step) for worker, step in pushed if step <= gone.get(f"worker-{worker}", math.inf)}
    wrong = _otherwise_often(folder, _samples(pushed, counted), _samples(_pushed(whole), _pushed(whole)))
    number, least, most = Result(folder / "out").iteration, len(counted), len(pushed)
    if not least <= number <= most:
        wrong.append(f"there are {number} iterations; of {least} steps that count and {most} in all follow as many")
    return wrong


def _otherwise_often(folder: Path, samples: Counter[str], wanted: Counter[str]) -> list[str]:
    """That samples count otherwise than wanted; fewer times they may where the run has left some over."""
    may_lack = bool(_events(folder, "left_over"))
    differ = sorted(
        sample
        for sample in wanted.keys() | samples.keys()
        if samples[sample] > wanted[sample] or (samples[sample] < wanted[sample] and not may_lack)
    )
    if not differ:
        return []
    first = differ[0]
    told = f"sample {first} counts {samples[first]} times, and {wanted[first]} times in the undisturbed run"
    return [f"{len(differ)} samples count otherwise: {told}"]


def _events(folder: Path, name: str) -> list[EventRecord]:
    return [event for event in read_records(folder / "out", EventRecord) if event.name == name]


def _otherwise(copies: _Copies, wanted: Mapping[_Copy, set[Gradient]]) -> list[str]:
    """A line for each server whose copies have other gradients than these, or some of them more than once."""
    by_server: dict[str, list[tuple[_Copy, Gradient]]] = defaultdict(list)
    for copy, counted in copies.items():
        due = wanted[copy]
        by_server[copy.server] += [(copy, each) for each in due | counted.keys() if counted[each] != (each in due)]
    wrong = []
    for server, differ in sorted(by_server.items()):
        if differ:
            copy, gradient = min(differ)
            told = copy.told(gradient, copies[copy][gradient])
            wrong.append(f"{len(differ)} gradients count otherwise on {server}: {told}")
    return wrong


def _not_given(folder: Path, strikes: Sequence[Strike]) -> list[str]:
    """That the run says of a server that is left that it was given a copy, and the server does not."""
    dead, told = judging.dying(folder, strikes), counts.read(folder / "counted")
    return [
        f"{server} is said to have been given a copy of key range {key_range}, and has not written that down"
        for server, key_range in sorted(counts.holders(set(), folder / "out"))
        if server not in dead and not counts.was_given(told, server, key_range)
    ]


def _copies(folder: Path, whole: Path, strikes: Sequence[Strike]) -> _Copies:
    """Which gradients each copy is made of that is left; none where it counts nothing. The undisturbed run says which
    copies there were at the start, and of which shards. Servers with copies write down themselves what they count.
    Servers without copies write nothing, and none of them may die: the run's records say it."""
    of_whole, told = counts.read(whole / "counted"), counts.read(folder / "counted")
    dead, shards = judging.dying(folder, strikes), counts.shards(of_whole)
    found: dict[_Copy, Counter[Gradient]] = defaultdict(Counter)
    for server, key_range in counts.holders(counts.at_start(of_whole), folder / "out"):
        if server not in dead:
            found.update({_Copy(server, key_range, shard): Counter() for shard in shards[key_range]})
            for (shard, gradient), times in counts.counted(told, server, key_range).items():
                found[_Copy(server, key_range, shard)][gradient] += times
    if not of_whole:
        for update in read_records(folder / "out", UpdateRecord):
            found[_Copy(f"server-{update.server}", update.server, 0)][update.worker, update.clock] += 1
    return found


def _pushed(folder: Path) -> dict[Gradient, list[Any]]:
    """Of which samples each gradient is, as its worker has written down before it left."""
    found = {}
    for path in (folder / "pushed").iterdir():
        for line in path.read_text().splitlines(keepends=True):
            if line.endswith("\n"):  # else it died as it wrote, and before it pushed
                clock, samples = json.loads(line)
                found[int(path.name.rpartition("-")[2]), clock] = samples
    return found


def _samples(pushed: Mapping[Gradient, Sequence[Any]], gradients: Iterable[Gradient]) -> Counter[str]:
    return Counter(str(sample) for gradient in gradients for sample in pushed.get(gradient, ()))
