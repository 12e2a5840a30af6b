"""What one copy of a key range tells the next: entries, each of which is one change, as messages."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.errors import RunFailed
from paceline.messages import ALL_SHARDS, VOID, Kind, Message, WireError, from_frames, to_frames
from paceline.server import standing, whole_pushes
from paceline.server.closing import Closed
from paceline.server.part import Part
from paceline.server.part_state import initialise, set_state, state_fields
from paceline.server.server_core import ServerCore
from paceline.server.state import pack, unpack
from paceline.server.tables.shards import RowUpdate, TableShards
from paceline.server.whole_updates import Round

_CLOSED, _PARAMETERS, _STATE, _LEFT = "closed", "parameters", "state", "left"
_ROWS, _TABLES, _STATES, _PIECE = "rows", "tables", "row states", "piece"
_OF_TABLES = {kind.value: kind for kind in (Kind.OPEN_TABLES, Kind.SET_ROWS, Kind.LOAD_ROWS, Kind.PUSH_ROWS)}
_WHOLE, _SHARD, _PUSHES = "whole", "shard", "pushes"
_ATTACHED, _HELD, _LET_GO, _EXPECTED, _LET_IN = "attached", "held", "let go", "expected", "let in"


def of_closed(index: int, core: ServerCore, closed: Closed) -> Message:
    """A shard closes a clock. The entry has the update's gradient, already joined: one copy, whatever the number of
    workers (Li et al., OSDI 2014, section 4.3, replication after aggregation)."""
    pushes = [core.pushes.last(worker) for worker in closed.contributors]
    body = {
        "what": _CLOSED,
        "contributors": [[worker, *numbers] for worker, numbers in closed.contributors.items()],
        "clocks": [[worker, *numbers] for worker, numbers in closed.clocks.items()],
        "groups": [[worker, groups] for worker, groups in closed.groups.items()],
        "pushes": [whole_pushes.to_body(push) for push in pushes if push is not None],
        "stop": closed.stop,
        "is_void": closed.gradients is None,
        "round": None if closed.round is None else closed.round.plain,
    }
    return _entry(body, shard=index, tensors=closed.gradients or ())


def of_rows(tables: TableShards, updates: Sequence[RowUpdate]) -> Message:
    """Rows are updated with the clock that was closed last: their gradients, already joined."""
    copied = [tables.copied(update) for update in updates]
    tensors = [tensor for _, some in copied for tensor in some]
    return _entry({"what": _ROWS, "updates": [body for body, _ in copied]}, tensors=tensors)


def of_request(message: Message, parts: Sequence[Part]) -> list[Message]:
    """What a worker's message has changed besides closing clocks: the parameters at the start, the optimizers' state,
    who is there, the tables as a whole, and gradients of rows that wait for their push."""
    if message.kind is Kind.INITIALISE:
        chosen = range(len(parts)) if message.shard == ALL_SHARDS else (message.shard,)
        body = {"what": _PARAMETERS}
        return [
            _entry(body, shard=index, tensors=parts[index].shard.parameters, iteration=message.iteration)
            for index in chosen
        ]
    if message.kind is Kind.SET_STATE:
        return [_with_payload(_entry({**message.body, "what": _STATE}), message)]
    if message.kind in _OF_TABLES.values():
        about = {"kind": message.kind.value, "worker": message.sender, "at": message.clock, "body": message.body}
        return [_with_payload(_entry({"what": _TABLES, **about}), message)]
    return [_entry({"what": _LEFT, "worker": message.sender})] if message.kind is Kind.LEAVE else []


def of_attached(message: Message) -> Message:
    """A worker is there, whose memory a copy on its host has to reach once it is gone."""
    return _entry({"what": _ATTACHED, "worker": message.sender, "flags": message.flags, "reach": message.body})


def is_of_attached(entry: Message) -> bool:
    """Whether `of_attached` gives this."""
    return entry.body.get("what") == _ATTACHED


def is_of_rows(entry: Message) -> bool:
    """Whether `of_rows` gives this."""
    return entry.body.get("what") == _ROWS


def of_states(states: Mapping[str, Tensor]) -> Message:
    """What an update, or several, have left of the rows of some keys, as `Giving.changes` gives it."""
    return _of_states(_STATES, states)


def of_piece(states: Mapping[str, Tensor]) -> Message:
    """Some of the rows that there are, as `Giving.piece` gives them. It has no number."""
    return _of_states(_PIECE, states)


def is_piece(entry: Message) -> bool:
    """Whether `of_piece` gives this."""
    return entry.body.get("what") == _PIECE


def attempt_of(entry: Message) -> int | None:
    """Where what `of_whole` gives begins with this: at which attempt."""
    return entry.body["attempt"] if entry.body.get("what") == _WHOLE else None


def of_held(push: Message, tensors: Sequence[Tensor]) -> Message:
    """All of a worker's push is there, and counts when other servers have it."""
    return _entry({"what": _HELD, "push": whole_pushes.to_body(push)}, tensors=() if push.flags & VOID else tensors)


def of_let_go(worker: int, counts: Message | None) -> Message:
    """All go on without this worker, whose last push is this one."""
    return _entry(
        {"what": _LET_GO, "worker": worker, "counts": None if counts is None else whole_pushes.to_body(counts)}
    )


def of_expected(worker: int) -> Message:
    """This worker takes part from here on."""
    return _entry({"what": _EXPECTED, "worker": worker})


def of_let_in(worker: int, clock: int) -> Message:
    """It pushes for this clock first."""
    return _entry({"what": _LET_IN, "worker": worker, "at": clock})


def of_whole(core: ServerCore, attached: Iterable[Message], *, attempt: int = 0) -> list[Message]:
    """All that a fresh copy is to know, but of tables, one entry after the other.

    Args:
        attached: what `of_attached` has given, of each worker the last.
        attempt: counts how often the core was to be copied.

    Raises:
        WireError: some of it cannot be sent.
    """
    shards = [
        _entry({"what": _SHARD, **standing.to_body(part.shard.standing())}, shard=index, tensors=part.shard.parameters)
        for index, part in enumerate(core.parts)
    ]
    counted = [whole_pushes.to_body(push) for push in core.pushes.counted()]
    held = [of_held(*core.intake.held_push(push.sender)) for push in core.pushes.all_held()]
    fields = state_fields(core.parts)
    state = Message(Kind.REPLICATE, 0, **{**fields, "body": {**fields["body"], "what": _STATE}})
    pushes = _entry({"what": _PUSHES, "counted": counted, "gone": list(core.attendance.gone)})
    return [_entry({"what": _WHOLE, "attempt": attempt}), *attached, *shards, state, pushes, *held]


def of_tables(core: ServerCore) -> list[Message]:
    """What a fresh copy is to know of tables, behind all else, but for their rows."""
    return [entry for asked in core.tables.asked_for() for entry in of_request(asked, core.parts)]


def apply(
    entry: Message,
    core: ServerCore,
    gradients: Sequence[Sequence[Tensor]],
    reach: Callable[[Message], None],
) -> None:
    """Do what the entry says.

    Args:
        gradients: for each shard, where those of an entry are put while they are used.
        reach: attaches a worker, with its memory if that can be had.

    Raises:
        WireError: it is no entry for these shards.
    """
    what, body, parts = entry.body.get("what"), entry.body, core.parts
    try:
        if what == _CLOSED:
            for push in body["pushes"]:
                core.pushes.count(whole_pushes.from_body(push))
            part = parts[entry.shard]
            joined = None if body["is_void"] else gradients[entry.shard]
            if joined is not None:
                from_frames(entry.payload, joined)
            part.shard.repeat(_closed(body, joined))
        elif what == _PARAMETERS:
            initialise(parts[entry.shard], entry, None)
            for worker in parts[entry.shard].shard.rule.members.ranks:
                parts[entry.shard].shard.pulled(worker)
        elif what == _STATE:
            set_state(parts, entry)
        elif what == _WHOLE:
            pass
        elif what == _SHARD:
            initialise(parts[entry.shard], entry, None)
            parts[entry.shard].shard.stand(standing.from_body(body))
        elif what == _PUSHES:
            for push in body["counted"]:
                core.pushes.count(whole_pushes.from_body(push))
            for worker in body["gone"]:
                core.attendance.part_with(worker)
        elif what == _ROWS:
            updates = [core.tables.read_update(told) for told in body["updates"]]
            from_frames(entry.payload, [tensor for update in updates for tensor in update.gradients])
            core.tables.repeat(updates)
        elif what in (_STATES, _PIECE):
            core.tables.take_states(unpack(body, entry.payload))
        elif what == _TABLES:
            kind, worker, clock = _OF_TABLES[body["kind"]], body["worker"], body["at"]
            asked = Message(kind, 0, sender=worker, clock=clock, body=body["body"], payload=entry.payload)
            _do_with_tables(core, asked)
        elif what == _LEFT:
            for part in parts:
                part.shard.leave(body["worker"])
        elif what == _ATTACHED:
            reach(Message(Kind.ATTACH, 0, sender=body["worker"], flags=body["flags"], body=body["reach"]))
        elif what == _HELD:
            core.intake.copy_held(whole_pushes.from_body(body["push"]), entry.payload)
        elif what == _LET_GO:
            counts = body["counts"]
            _do_alone(
                core.attendance.let_go(body["worker"], None if counts is None else whole_pushes.from_body(counts), 0.0)
            )
        elif what == _EXPECTED:
            core.attendance.expect(body["worker"])
        elif what == _LET_IN:
            _do_alone(core.attendance.let_in(body["worker"], body["at"], 0.0))
        else:
            raise ValueError(f"{what!r} is none")
    except (LookupError, TypeError, ValueError) as error:
        raise WireError(f"refused an entry of another copy: {error}") from None


def _do_with_tables(core: ServerCore, message: Message) -> None:
    """What the head has done already. Raises RunFailed where this host does not let a copy do it."""
    try:
        core.tables.receive(message)
    except WireError as error:
        raise RunFailed(
            f"a copy of tables cannot do what the server before it has done: {error}; files of tables, and of "
            "checkpoints, have to be where the hosts of all servers see them"
        ) from error


def _do_alone(actions: Iterable[object]) -> None:
    """Have a copy do what it does without a word to anybody; whoever serves has said it."""
    for _ in actions:
        pass


def zeroed(parts: Sequence[Part]) -> list[list[Tensor]]:
    """Where `apply` puts gradients."""
    return [[torch.zeros_like(parameter) for parameter in part.shard.parameters] for part in parts]


def _entry(body: Mapping[str, Any], *, tensors: Sequence[Tensor] = (), **fields: Any) -> Message:
    # The tensors change before a socket has read them, and the next copy may have to be told again: a copy.
    payload = [bytes(frame) for frame in to_frames(tensors)]
    return Message(Kind.REPLICATE, 0, body=body, payload=payload, tensor_bytes=sum(map(len, payload)), **fields)


def _of_states(what: str, states: Mapping[str, Tensor]) -> Message:
    body, _ = pack(states)
    return _entry({**body, "what": what}, tensors=list(states.values()))


def _with_payload(entry: Message, message: Message) -> Message:
    """The entry, which brings the message's tensors."""
    entry.payload, entry.tensor_bytes = [bytes(frame) for frame in message.payload], message.tensor_bytes
    return entry


def _closed(body: Mapping[str, Any], gradients: Sequence[Tensor] | None) -> Closed:
    return Closed(
        gradients,
        {worker: (clock, staleness) for worker, clock, staleness in body["contributors"]},
        {worker: (clock, pulled_at) for worker, clock, pulled_at in body["clocks"]},
        {worker: standing.of_groups(groups) for worker, groups in body["groups"]},
        body["stop"],
        None if body["round"] is None else Round.of_plain(body["round"]),
    )
