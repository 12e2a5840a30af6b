"""What a strategy's options say of codecs, and what does not go together."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal, final

import torch
from torch import Tensor

from paceline.codec import Auto, Codec, TensorCodec
from paceline.errors import UsageError
from paceline.layout import Layout
from paceline.server.coded_push import PushCoding
from paceline.strategies.base import Context
from paceline.strategies.pacing import Pacing, RealTime

Scope = Literal["links", "all"]
CODEC_DOC = "the form in which gradients travel, such as int8, top-k or powersgd; none: as they are"
SCOPE_DOC = "links: only what leaves a host is coded; all: everything, for tests and studies of accuracy"
NOTHING_CODED = "nothing is coded: all workers are on one host"


@final
@dataclass(frozen=True)
class Coding:
    """What one worker's exchange of gradients is coded with."""

    codec: Codec
    seed: int = 0
    """Draws derive from it, and from the step."""
    among_hosts: bool = False
    """Workers of a host join their tensors first, as they are, so that only what leaves it is coded."""
    pacing: Pacing = field(default_factory=RealTime)
    """The worker's clock, which is told what coding takes."""
    before: Codec | None = None
    """What encodes the steps before the codec's first one; none: these go uncoded."""
    place: tuple[int, int] = (0, 1)
    """Which part of a tensor it codes: with `among_hosts` its number on its host, and how many workers that has."""
    leaves: Callable[[], bool] | None = None
    """Whether this worker is to leave the others after an exchange; none: nobody does."""


def coding_of(codec: Codec | None, scope: Scope, context: Context) -> Coding | None:
    """None where nothing is coded: no codec was asked for, or none of its bytes leaves a host."""
    if codec is None or (scope == "links" and context.local_size == context.size):
        return None
    reform = context.reform
    coding = Coding(
        codec,
        context.seed,
        pacing=context.pacing,
        leaves=None if reform is None else lambda: reform.is_asked_to_leave,
    )
    if scope == "all":
        return coding
    return replace(coding, among_hosts=True, place=(context.local_rank, context.local_size))


def push_coding_of(
    codec: TensorCodec | None, scope: Scope, context: Context, layout: Layout, *, is_weighted: bool
) -> PushCoding | None:
    """How a worker codes what it pushes to servers. Raises UsageError for tensors that no codec knows.

    Args:
        is_weighted: as `PushCoding` has it.
    """
    if codec is None:
        return None
    for segment in layout.segments:
        require_real(codec, segment.dtype)
    left = torch.zeros(layout.num_bytes, dtype=torch.uint8) if codec.feedback else None
    pacing, coding = context.pacing, PushCoding(codec, context.seed, left, scope == "all", is_weighted)
    if not pacing.is_simulated:
        return coding
    return replace(coding, spend=pacing.spend, operation_s=pacing.operation_s)


def left_of(coding: PushCoding | None, layout: Layout) -> list[Tensor]:
    """What codecs have left out of pushes up to now, a tensor each segment; empty where it is forgotten."""
    left = None if coding is None else coding.left
    return [] if left is None else [segment.view(left) for segment in layout.segments]


def require_averaging(codec: Codec | None, scope: Scope, *, of_servers: bool = False) -> None:
    """Raises UsageError for what does not go together.

    Args:
        of_servers: workers push what they encode alone, and servers average it.
    """
    if codec is None:
        if scope != "links":
            raise UsageError(f"codec_scope={scope} has no effect without a codec")
        return
    if of_servers and codec.adapts:
        raise UsageError(
            f"codec={codec} is chosen after some steps, and servers are told at the start; name one (`paceline plan`)"
        )
    if of_servers and codec.joint:
        raise UsageError(
            f"codec={codec} averages among workers half-way, and workers push to servers one by one; use all-reduce"
        )
    if of_servers and codec.votes and scope != "all":
        raise UsageError(
            f"codec={codec} is joined by a vote of all workers, and with codec_scope=links those on a server's host "
            "push gradients as they are: use codec_scope=all, codec=one-bit, or all-reduce"
        )


def of_changes(codec: Codec | None) -> Codec | None:
    """`auto` among what may carry changes of rounds."""
    return codec.of_those(lambda each: _not_of_changes(each) is None) if isinstance(codec, Auto) else codec


def of_neighbours(codec: Codec | None) -> Codec | None:
    """`auto` among what neighbours may share estimates with."""
    return codec.of_those(lambda each: _not_of_neighbours(each) is None) if isinstance(codec, Auto) else codec


def require_of_changes(codec: Codec | None, scope: Scope, *, delay: int) -> None:
    """Raises UsageError for what cannot carry what workers changed in a round of local steps.

    Args:
        delay: steps that workers go on while changes are under way.
    """
    require_averaging(codec, scope)
    if codec is None:
        return
    _require(codec, _not_of_changes)
    if delay:
        raise UsageError(
            f"codec={codec} codes and moves a fragment when it is joined, so that delay={delay} hides nothing and only "
            "makes it stale; leave one of the two out"
        )


def require_of_pushed_changes(codec: Codec | None, scope: Scope) -> None:
    """Raises UsageError for what cannot carry a worker's change to servers that step with some workers' mean."""
    if codec is not None:
        _require(codec, _not_of_changes)
    require_averaging(codec, scope, of_servers=True)


def require_of_neighbours(codec: Codec | None, scope: Scope) -> None:
    """Raises UsageError for what cannot carry differences to estimates that neighbours share."""
    require_averaging(codec, scope)
    if codec is not None:
        _require(codec, _not_of_neighbours)


def _require(codec: Codec, why_not: Callable[[Codec], str | None]) -> None:
    """Raises UsageError, with the reason, unless it may be taken: of `auto`, unless one of its candidates may."""
    among = codec.candidates if isinstance(codec, Auto) else (codec,)
    reasons = [why_not(each) for each in among]
    if None not in reasons:
        raise UsageError(str(reasons[0]))


def _not_of_changes(codec: Codec) -> str | None:
    if codec.votes:
        return (
            f"codec={codec} says which way parameters went and not how far, and the outer step needs both: use one-bit"
        )
    return None


def _not_of_neighbours(codec: Codec) -> str | None:
    if codec.joint:
        return f"codec={codec} averages among all workers, and in gossip nobody hears everybody; use int8"
    if not codec.contracts:
        return (
            f"codec={codec} may leave out more than there is, so that what neighbours believe of a model would drift "
            "off; use fp16, bf16, int8, fp8, one-bit, top-k or dct"
        )
    return None


def require_real(codec: Codec, dtype: torch.dtype) -> None:
    """Raises UsageError for gradients that no codec knows."""
    if dtype.is_complex:
        raise UsageError(f"codec={codec} takes real gradients, and some parameters are complex; leave the codec out")
