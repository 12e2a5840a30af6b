"""Serving a federated run to clients elsewhere, and joining one."""

import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import filelock

from paceline.checkpoint import Checkpoint
from paceline.checkpoint_files import from_newest, go_back
from paceline.comm.tickets import Ticket, Tickets, split_address
from paceline.config import RunConfig
from paceline.engines.scripting import Script, read_script
from paceline.engines.served.running import JoinedRun, ServedRun
from paceline.errors import UsageError
from paceline.records import truncate
from paceline.running import manifest, resuming
from paceline.running.checks import check_metric
from paceline.running.result import Result
from paceline.served.rules import Rules
from paceline.strategies import build, name_of
from paceline.strategies.base import Strategy
from paceline.training.pauses import MODEL_FILE

Say = Callable[[str], None]
_LOCK, _LOCK_S = "serving.lock", 6.0
"""A directory is waited for so long: loaders' workers notice within 5 s that their process was killed."""


@dataclass(frozen=True, kw_only=True)
class Rounds:
    """What a server's rounds go by besides the strategy. Raises UsageError for what is out of range."""

    min_clients: int = 2
    """How many clients have to be there before a round begins."""
    deadline_s: float = 600.0
    """A round lasts so long at most; updates that come later are dropped."""
    outweigh: float = 10.0
    """A client counts at most so many times as much as the median one of its round, whatever it says of itself."""
    over: float = 1.0
    """How many times as many clients are drawn as are needed; a round ends with the first ones."""

    def __post_init__(self) -> None:
        if self.min_clients < 1:
            raise UsageError(f"min-clients must be at least 1, not {self.min_clients}")
        if not self.deadline_s > 0:
            raise UsageError(f"round-deadline must be positive, not {self.deadline_s}")
        if not self.outweigh >= 1 or not self.over >= 1:
            raise UsageError("outweigh and over must be at least 1")


def serve(
    script: str | Path | Script,
    *,
    strategy: str | Strategy,
    tickets: Path,
    listen: str | None = None,
    address: str | None = None,
    options: Mapping[str, Any] | None = None,
    arguments: Sequence[str] = (),
    rounds: Rounds | None = None,
    config: RunConfig | None = None,
    seed: int | None = None,
    out: Path | None = None,
    say: Say = print,
) -> Result:
    """Be the server of a federated run: its clients join with tickets, from wherever they are.

    Where `out` has a checkpoint, the run goes on from there, which is its last round. So the same call starts a server
    again, however it was ended.

    Args:
        tickets: a directory, which has as many tickets as the strategy has clients from here on.
        listen: `HOST` or `HOST:PORT`; none: every address, and the port of the tickets.
        address: of the server as clients reach it; none: this machine's name.
        seed: of what the server draws; none: that of the run that goes on, or drawn, so that nobody can tell its noise.
        out: the result directory, of this server's own runs; none: `run` in the tickets' directory.
        say: prints a line of the server's log.

    Raises:
        UsageError: something asked for cannot be had; nothing was started, unless only the script could tell.
        RunFailed: the script failed.
        KeyboardInterrupt: by Ctrl-C. The last round is saved, and clients wait for a server that goes on from there.
    """
    plan = build(strategy, options) if isinstance(strategy, str) else strategy
    _require_servable(plan)
    rules, config = rounds or Rounds(), config or RunConfig()
    if rules.over > 1 and getattr(plan, "privacy", None) is not None:
        raise UsageError("over draws more clients than epsilon is told for; leave over or privacy out")
    if rules.min_clients > plan.traits.num_clients:
        raise UsageError(
            f"min-clients={rules.min_clients} are never there, since there are {plan.traits.num_clients}; lower it, or "
            "give --clients"
        )
    program = script if isinstance(script, Script) else read_script(script, arguments)
    check_metric(program, config.target)
    known = Tickets.made(tickets, num_clients=plan.traits.num_clients, address=address)
    where = split_address(listen or "0.0.0.0", default_port=split_address(known.address)[1])
    directory = out or tickets / "run"
    with _alone_in(directory):
        _require_own(directory, origin := {"engine": "served", "of": known.run})
        checkpoint = _checkpoint_in(directory, say, may_go_back=getattr(plan, "privacy", None) is None)
        known_seed = _seed_in(directory, checkpoint)
        chosen = seed if seed is not None else known_seed if known_seed is not None else secrets.randbits(62)
        if known_seed not in (None, chosen):
            raise UsageError(f"the run in {directory} has another seed; leave --seed out, or give another --out")
        config = replace(config, seed=chosen, checkpoint_every=1)
        _begin(directory, program, plan, config, checkpoint, origin=origin)
        participation = plan.participation()
        assert participation is not None
        run = ServedRun(
            program,
            plan,
            config,
            tickets=known,
            listen=where,
            rules=Rules(
                sampler=participation.sampler,
                fraction=participation.fraction,
                seed=chosen,
                min_clients=rules.min_clients,
                deadline_s=rules.deadline_s,
                outweigh=rules.outweigh,
                over=rules.over,
                weighs=participation.weighs,
                least=participation.least,
            ),
            directory=directory,
            checkpoint=checkpoint,
            say=say,
        )
        say(f"listening at {where[0]}:{where[1]}; tickets for {known.address} are in {tickets}")
        run.run()
    return Result(directory)


def join(
    script: str | Path | Script,
    *,
    ticket: Path,
    arguments: Sequence[str] = (),
    address: str | None = None,
    secure: bool = False,
    config: RunConfig | None = None,
    seed: int | None = None,
    out: Path | None = None,
    say: Say = print,
) -> Result:
    """Be a client of a federated run, with this machine's data. The server says how turns are played and which model
    they begin with; it never says what to run.

    Args:
        ticket: the file that the server's owner has given to this client, and to nobody else.
        address: of the server, if not the ticket's.
        secure: take part only where the server learns sums of updates alone.
        seed: of what this client draws; none: drawn itself, so that not even the server can tell its noise.
        out: where this client keeps its records, and what it keeps from turn to turn; none: a directory of the
            ticket's under `runs`. It goes on with what is there, if that is this client's in this run.

    Raises:
        UsageError: the server refuses the ticket or the script's model, or something asked for cannot be had.
        DeadlineExceeded: the server says nothing.
        RunFailed: the script failed.
    """
    program = script if isinstance(script, Script) else read_script(script, arguments)
    own, config = Ticket.read(ticket), config or RunConfig()
    run = JoinedRun(own, address=address, deadline_s=config.deadline_s, say=say)
    try:
        name, options = run.welcome()
        plan = build(name, options)
        _require_servable(plan)
        if secure and getattr(plan, "secure", None) is None:
            raise UsageError(
                "this server is sent each client's update as it is, and you asked to join only under masks; have it "
                "served with --option secure=masks"
            )
        said = " ".join(f"{key}={value}" for key, value in options.items())
        say(f"joined as client {own.client}: {name} {said}".rstrip())
        # A server's owner may serve several runs with the same tickets.
        who = f"client-{own.client}-of-{own.run}-{run.tag}"
        directory = out or Path("runs") / who
        with _alone_in(directory):
            _require_own(directory, origin := {"engine": "joined", "of": who})
            checkpoint = _checkpoint_in(directory, say)
            chosen = seed if seed is not None else checkpoint.seed if checkpoint is not None else secrets.randbits(62)
            config = replace(config, seed=chosen, checkpoint_every=1)
            _begin(directory, program, plan, config, checkpoint, origin=origin)
            run.run(program, plan, config, directory, checkpoint)
    finally:
        run.close()
    return Result(directory)


def _require_servable(strategy: Strategy) -> None:
    """Raises UsageError for a strategy whose clients cannot be elsewhere."""
    participation = strategy.participation()
    if participation is None:
        raise UsageError(f"{name_of(strategy)} has no clients to serve; use fed-avg, or another fed-* strategy")
    if participation.sampler.draws_times:
        raise UsageError(
            f"sampler={participation.sampler} draws how long simulated clients take, and clients elsewhere take their "
            "time themselves; leave it out, and see --over and --round-deadline"
        )
    strategy.check_elsewhere()


@contextmanager
def _alone_in(directory: Path) -> Iterator[None]:
    """Raises UsageError if another process serves or joins there, before anything there is changed."""
    lock = filelock.FileLock(directory / _LOCK, timeout=_LOCK_S)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except filelock.Timeout:
        raise UsageError(
            f"another process is serving or joining in {directory}; end it, or give another --out"
        ) from None
    except OSError as error:
        raise UsageError(f"cannot write to {directory}: {error.strerror}; give another --out") from None
    try:
        yield
    finally:
        lock.release()


def _require_own(directory: Path, origin: Mapping[str, str]) -> None:
    """Raises UsageError if the directory has what another run has left there, or another client keeps."""
    if not (directory / manifest.FILE_NAME).exists():
        return
    found = manifest.read(directory)
    if found.get("engine") != origin["engine"] or found.get("of", origin["of"]) != origin["of"]:
        raise UsageError(f"{directory} is another run's, or another client's; give another --out")


def _checkpoint_in(directory: Path, say: Say, *, may_go_back: bool = True) -> Checkpoint | None:
    """The checkpoint to go on from, which is the newest in the directory from here on; none, if there is none yet.

    Args:
        may_go_back: take the one before where the newest is damaged.
    """
    if not any(path.exists() for path in from_newest(directory)):
        return None
    found = resuming.find(directory)
    if found.warnings and not may_go_back:
        raise UsageError(
            f"{found.warnings[0].split('; the run goes on')[0]}; with privacy= a round that is forgotten has been paid "
            f"for all the same, so nobody goes on from {found.path.name}"
        )
    for warning in found.warnings:
        say(warning)
    try:
        go_back(found.path, iteration=found.checkpoint.iteration)
    except OSError as error:
        raise UsageError(f"cannot write to {directory}: {error.strerror}; give another --out") from None
    return found.checkpoint


def _seed_in(directory: Path, checkpoint: Checkpoint | None) -> int | None:
    """The seed of the run that lies there, also where that has no round yet, so that clients who have joined go on with
    it; none, if none does."""
    if checkpoint is not None:
        return checkpoint.seed
    if (directory / manifest.FILE_NAME).exists():
        seed = manifest.read(directory).get("config", {}).get("seed")
        if type(seed) is int:
            return seed
    return None


def _begin(
    directory: Path,
    program: Script,
    strategy: Strategy,
    config: RunConfig,
    checkpoint: Checkpoint | None,
    *,
    origin: Mapping[str, str],
) -> None:
    """Make the result directory, or cut off what was recorded there after its checkpoint."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if checkpoint is not None:
            truncate(directory, iteration=checkpoint.iteration)
            (directory / MODEL_FILE).unlink(missing_ok=True)
        described = manifest.describe_run(
            program=program.path, arguments=program.arguments, strategy=strategy, num_workers=1, config=config
        )
        manifest.write(directory, {**described, **origin})
    except OSError as error:
        raise UsageError(f"cannot write to {directory}: {error.strerror}; give another --out") from None
