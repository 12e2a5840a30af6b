"""Which codec encodes a worker's exchanges: the one that was asked for, or what `auto` comes to choose."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import final

from paceline.codec import Auto, Chosen, Codec
from paceline.strategies.base import Context
from paceline.strategies.choosing import Choosing
from paceline.strategies.coding import NOTHING_CODED, Coding, Scope, coding_of

Watch = Callable[[Auto, Context, Coding], Choosing]
"""Begins to watch exchanges among these workers, to see what codecs are worth there. Collective call."""
_Plain = list[str | None]


@final
class CodecChoice:
    """One worker's; all choose alike.

    What `auto` has chosen stays for the run, whoever comes and goes. Until then watching begins anew with each change
    of who is there.

    Args:
        codec: none: nothing is ever coded.
        watch: for `auto`.
    """

    def __init__(self, codec: Codec | None, scope: Scope, watch: Watch) -> None:
        self._codec, self._scope, self._watch = codec, scope, watch
        self._coding: Coding | None = None  # that it would be, with a codec to be named
        self._choosing: Choosing | None = None
        self._found: Chosen | None = None  # and not taken up yet
        self._chosen: Chosen | None = None

    def begin(self, context: Context) -> Coding | None:
        """What encodes among these workers, if anything does. Collective call."""
        self._found = self._choosing = None
        self._coding = coding_of(self._codec, self._scope, context)
        if self._coding is not None and isinstance(self._codec, Auto) and self._chosen is None:
            self._choosing = self._watch(self._codec, context, self._coding)
        return self.present

    def rejoin(self, context: Context) -> Coding | None:
        """As `begin`, among those who are there now, of whom some may have chosen. Collective call of all these."""
        if isinstance(self._codec, Auto):
            told: list[_Plain] = context.collective.all_gather_object(_plain(self._chosen))
            self._chosen = next((_of_plain(self._codec, each) for each in told if each), None)
        return self.begin(context)

    def look(self) -> None:
        """An exchange is over. Once there were enough, a codec is chosen, for `take_up`. Collective call."""
        if self._choosing is not None:
            self._found = self._choosing.step_ended()

    @property
    def has_found(self) -> bool:
        """Whether it has just been chosen, for `take_up`."""
        return self._found is not None

    def take_up(self) -> Coding | None:
        """What encodes from here on, if anything does. Nothing is under way."""
        assert self._found is not None
        self._chosen, self._found, self._choosing = self._found, None, None
        return self._as_chosen()

    @property
    def present(self) -> Coding | None:
        """What encodes at present, if anything does."""
        return self._as_chosen() if isinstance(self._codec, Auto) else self._coding

    @property
    def codec(self) -> Codec | None:
        """The codec that was asked for, or that `auto` has chosen."""
        return self._codec if self._chosen is None else self._chosen.codec

    def told(self, facts: Mapping[str, float | str]) -> Mapping[str, float | str]:
        """These, for the records, with what encodes at present; the same mapping where that is nothing new."""
        now = {**{name: fact for name, fact in facts.items() if name != "codec"}, **self._facts()}
        return facts if now == facts else now

    def _facts(self) -> Mapping[str, str]:
        if self._codec is None:
            return {}
        if self._coding is None:
            return {"codec": NOTHING_CODED}
        if self._chosen is not None:
            return {"codec": self._chosen.why}
        return {} if self._codec.adapts else {"codec": str(self._codec)}

    def _as_chosen(self) -> Coding | None:
        if self._coding is None or self._chosen is None or self._chosen.codec is None:
            return None
        return replace(self._coding, codec=self._chosen.codec, before=self._chosen.before)


def _plain(chosen: Chosen | None) -> _Plain:
    """Plain data; empty for none."""
    if chosen is None:
        return []
    codec, why, before = chosen
    return [why, *(None if each is None else str(each) for each in (codec, before))]


def _of_plain(auto: Auto, plain: _Plain) -> Chosen:
    """The inverse of `_plain`."""
    named: dict[str | None, Codec] = {str(codec): codec for codec in auto.candidates}
    why, codec, before = plain
    return Chosen(named.get(codec), str(why), named.get(before))
