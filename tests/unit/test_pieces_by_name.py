"""Options that name a piece, as the command line, studies and Python write them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import pytest

from paceline import pieces
from paceline.config import RunConfig
from paceline.errors import UsageError
from paceline.lab.variant import Variant
from paceline.pieces import Piece
from paceline.running.manifest import describe_run
from paceline.strategies import STRATEGIES, Entry, build, register
from paceline.strategies.base import Strategy, option
from paceline.strategies.traits import Traits


class Shape(Piece):
    pass


@dataclass(frozen=True)
class Box(Shape, name="box"):
    width: int = 1
    is_open: bool = False
    kind: Literal["flat", "tall"] = "flat"


@dataclass(frozen=True)
class Pile(Shape, name="pile"):
    height: float


@dataclass(frozen=True)
class Unnamed(Box):
    pass


@dataclass(frozen=True, kw_only=True)
class Shaped(Strategy):
    shape: Shape = option(Box(), "what it looks like")
    other: Shape | None = option(None, "what else")
    size: int = option(1, "how large")
    count: int | None = option(None, "how many")
    part: float | Literal["auto"] = option("auto", "how much")

    @property
    def traits(self) -> Traits:
        return Traits(lock_step=True)

    def bind(self, context: Any, replica: Any) -> Any:
        raise NotImplementedError


@pytest.fixture(autouse=True)
def entry() -> Iterator[None]:
    register(Entry(name="shaped", strategy=Shaped))
    yield
    del STRATEGIES["shaped"]


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({}, Shaped()),
        ({"shape": "pile:height=2.5"}, Shaped(shape=Pile(2.5))),
        ({"shape": "pile", "shape.height": "2.5"}, Shaped(shape=Pile(2.5))),
        ({"shape.height": "2.5", "shape": "pile"}, Shaped(shape=Pile(2.5))),
        ({"shape.width": "3"}, Shaped(shape=Box(3))),
        ({"shape": "box:width=3", "shape.is_open": "true"}, Shaped(shape=Box(3, True))),
        ({"shape": Pile(1), "size": "2"}, Shaped(shape=Pile(1), size=2)),
        ({"other": "box", "other.width": 2}, Shaped(other=Box(2))),
        ({"size": 10.0, "count": 10.0, "part": 10.5}, Shaped(size=10, count=10, part=10.5)),
    ],
)
def test_options_name_pieces_and_set_their_own_options(options: dict[str, Any], wanted: Strategy) -> None:
    built = build("shaped", options)
    assert built == wanted
    assert repr(built) == repr(wanted)  # 10, not 10.0


def test_options_may_stand_behind_the_name() -> None:
    assert build(" shaped:shape=pile:shape.height=2.5 ", {"size": "2"}) == Shaped(shape=Pile(2.5), size=2)
    for text, options in (("shaped:size=1", {"size": "1"}), ("shaped:size=1:size=1", {})):
        with pytest.raises(UsageError, match="size is given twice"):
            build(text, options)
    with pytest.raises(UsageError, match="not of the form option=value"):
        build("shaped:size")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"shape": "bos"}, "unknown shape 'bos'; did you mean 'box'?"),
        ({"shape": "box:wide=1"}, "wide"),
        ({"shape": "box", "shape.wide": "1"}, "option for shape box"),
        ({"shape": "box:width=1", "shape.width": "2"}, "width is given twice"),
        ({"shape": "box:width=one"}, "width='one' is not a whole number"),
        ({"shape": "box:is_open=1"}, "neither true nor false"),
        ({"shape": "box:kind=round"}, "kind must be one of flat, tall, not 'round'"),
        ({"size": 1.5}, "size=1.5 is not a whole number"),
        ({"count": 1.5}, "count=1.5 is not a whole number"),
        ({"shape": "box", "shape.width": 1.5}, "width=1.5 is not a whole number"),
        ({"shape": "pile"}, "pile needs height, as in pile:height="),
        ({"shape": "box:width"}, "not of the form"),
        ({"shape": "Unnamed"}, "Unnamed"),
        ({"size.width": "1"}, "size.width"),
        ({"form.width": "1"}, "form.width"),
    ],
)
def test_wrong_pieces_are_named(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError) as raised:
        build("shaped", options)
    assert words in str(raised.value)


@pytest.mark.parametrize("strategy", [Shaped(), Shaped(shape=Pile(2.5)), Shaped(other=Box(1, True), size=3)])
def test_a_study_writes_a_strategy_as_it_reads_it(strategy: Strategy) -> None:
    variant = Variant.of(strategy)
    assert Variant.parse(variant.text).strategy == strategy
    assert variant.text.count(":") == variant.text.count("=")


def test_text_of_a_piece_is_read_as_the_same_piece() -> None:
    for piece in (Box(), Box(3), Box(is_open=True), Pile(2)):
        assert pieces.read(Shape, str(piece)) == piece


def test_manifest_holds_pieces_as_text() -> None:
    described = describe_run(
        program="x.py", arguments=(), strategy=Shaped(shape=Box(3)), num_workers=1, config=RunConfig()
    )
    assert described["strategy"]["shape"] == "box:width=3"
    assert described["strategy"]["other"] is None
