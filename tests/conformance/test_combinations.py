"""Strategy, codec and topology: each combination runs, or is refused with a reason that names what does not fit."""

from __future__ import annotations

import itertools
from functools import partial
from pathlib import Path

import pytest

from paceline import pieces
from paceline.codec import Codec
from paceline.errors import UsageError
from paceline.strategies import STRATEGIES, build
from paceline.strategies.base import Strategy
from paceline.topology import Topology
from tests.conformance import virtual_engine
from tests.conformance.rows import launched, train

WORKERS = 8
MODES = ("average", "push-sum", "running-sums", "relay", "outer")
CODECS = (None, *sorted(pieces.named(Codec)))  # type: ignore[type-abstract]
TOPOLOGIES = tuple(sorted(set(pieces.named(Topology)) - {"edge-list", "graph"}))  # type: ignore[type-abstract]
ROUNDS = (
    {},
    {"outer": "nesterov", "fragments": "2"},
    {"delay": "1"},
    {"aggregate": "median"},
    {"aggregate": "krum:byzantine=1"},
    {"momentum_every": "2"},
)


def outcome(name: str, options: dict[str, str]) -> Strategy | str:
    """The strategy, or the reason why it is refused."""
    try:
        strategy = build(name, options)
        strategy.check(num_workers=WORKERS)
    except UsageError as error:
        return str(error)
    return strategy


def gossips() -> list[tuple[str, dict[str, str]]]:
    found = []
    for mode, codec, topology in itertools.product(MODES, CODECS, TOPOLOGIES):
        options = {"mode": mode, "topology": topology, "own_scores": "false", "every": "1"}
        found.append(("gossip", options if codec is None else {**options, "codec": codec, "codec_scope": "all"}))
    found += [("ad-psgd", {"topology": topology, "own_scores": "false"}) for topology in TOPOLOGIES]
    return found


def rounds() -> list[tuple[str, dict[str, str]]]:
    found = []
    for options, codec in itertools.product(ROUNDS, CODECS):
        more = {} if codec is None else {"codec": codec, "codec_scope": "all"}
        found.append(("local-sgd", {"every": "2", **options, **more}))
    return found


def others() -> list[tuple[str, dict[str, str]]]:
    """Every other name with every codec."""
    names = [name for name in STRATEGIES if name not in ("gossip", "ad-psgd", "local-sgd")]
    found = []
    for name, codec in itertools.product(names, CODECS[1:]):
        scope = {"codec_scope": "all"} if "codec_scope" in STRATEGIES[name].options else {}
        found.append((name, {"codec": codec, **scope}))
    return found


def test_what_is_refused_is_named() -> None:
    refused = 0
    for name, options in (*gossips(), *rounds()):
        found = outcome(name, options)
        if isinstance(found, str):
            refused += 1
            told = found.replace("\n", " ")
            named = [
                value for key, value in options.items() if key != "codec_scope" and value.partition(":")[0] in told
            ]
            assert named, f"{name} {options}: {told}"
            assert ";" in told or "which" in told or "and" in told, told  # a reason, or a remedy, beside the fact
    assert refused > 500


def test_a_codec_that_a_strategy_does_not_take_is_refused_with_the_reason() -> None:
    """Every other name of the registry with every codec; that there is no such option is no reason."""
    found = {(name, options["codec"]): outcome(name, options) for name, options in others()}
    refused = {case: told for case, told in found.items() if isinstance(told, str)}
    for (name, codec), told in refused.items():
        assert "unknown option" not in told, (name, codec)
        assert "codec" in told, (name, codec, told)
        assert any(mark in told for mark in (";", ":", "which", "and")), told
    assert {name for name, _ in found} - {name for name, _ in refused} == {"all-reduce"}, "which takes all of them"
    assert not {("async-diloco", "int8"), ("ps-asp", "top-k"), ("diloco", "powersgd")} & set(refused)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_what_is_not_refused_runs(tmp_path: Path) -> None:
    """On the virtual engine, three steps or rounds of eight workers, to finite models."""
    accepted = [
        (name, options) for name, options in (*gossips(), *rounds()) if not isinstance(outcome(name, options), str)
    ]
    assert len(accepted) > 100
    for number, (name, options) in enumerate(accepted):
        out = tmp_path / str(number)
        program = partial(launched, partial(train, num_epochs=1))
        out.mkdir()
        result = virtual_engine.run(
            partial(program, out), strategy=name, options=options, workers=WORKERS, out=out / "run", max_steps=1
        )
        assert result.iteration >= 1, (name, options)
        assert all(tensor.isfinite().all() for tensor in result.model_state().values()), (name, options)
