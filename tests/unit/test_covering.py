"""A covering choice leaves out no script, no strategy, and nothing that a script is told."""

from __future__ import annotations

import pytest

from tests.conformance import (
    odd_batches,
    odd_copies,
    odd_data,
    odd_habits,
    odd_hunted,
    odd_kept,
    odd_losses,
    odd_recipes,
    odd_trainers,
    odd_weights,
    test_odd_hunted,
    test_odd_trainers,
)
from tests.conformance.odd_judging import FAMILIES
from tests.covering import covering, in_turns

HUNTED = (odd_hunted, odd_habits, odd_recipes, odd_data, odd_batches, odd_weights, odd_losses)
OF_TRAINERS = (odd_copies, odd_trainers, odd_kept)


def test_scripts_take_the_strategies_of_a_family_by_turns() -> None:
    cases = covering("abc", [["x", "y"], ["z"]])
    assert [case[:2] for case in cases if case[2]] == [
        ("x", "a"), ("z", "a"), ("y", "b"), ("z", "b"), ("x", "c"), ("z", "c"),
    ]  # fmt: skip


def test_every_case_of_the_product_is_there() -> None:
    assert sorted(case[:2] for case in covering("ab", [["x", "y"]])) == [(s, n) for s in "xy" for n in "ab"]


def test_whatever_a_script_is_told_it_is_told_once_a_family() -> None:
    told = {"x": 1, "y": 2, "z": 2}
    chosen = [strategy for strategy, _, is_chosen in covering("a", ["xyz"], lambda one, _: told[one]) if is_chosen]
    assert chosen == ["x", "y"]


def test_cases_that_are_left_out_are_marked() -> None:
    marks = {case.values: [mark.name for mark in case.marks] for case in in_turns("ab", ["x", "y"])}
    assert marks["x", "a"] == marks["y", "b"] == ["slow"]
    assert marks["y", "a"] == marks["x", "b"] == ["slow", "product"]


@pytest.mark.parametrize(
    ("kinds", "cases"),
    [
        (HUNTED, list(covering(test_odd_hunted.SCRIPTS, FAMILIES, test_odd_hunted.refusal))),
        (
            OF_TRAINERS,
            list(
                covering(test_odd_trainers.SCRIPTS, FAMILIES, lambda *case: test_odd_trainers.refusal("virtual", *case))
            ),
        ),
    ],
    ids=["hunted", "of trainers"],
)
def test_every_strategy_has_scripts_of_every_kind(kinds: list[object], cases: list[tuple[str, str, bool]]) -> None:
    for kind in kinds:
        of_kind = {strategy for strategy, name, is_chosen in cases if is_chosen and name in kind.SCRIPTS}
        assert of_kind == {strategy for family in FAMILIES for strategy in family}
