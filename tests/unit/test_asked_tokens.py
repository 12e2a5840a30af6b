"""A cluster is asked for its token before it is connected to."""

from __future__ import annotations

import secrets

import pytest

from paceline.engines.ray import tokens
from paceline.errors import UsageError

WITHOUT_A_TOKEN = True


@pytest.mark.parametrize(("answers", "is_taken"), [([False], True), ([True, False], True), ([True, True, True], False)])
def test_a_token_is_asked_about_more_than_once(
    answers: list[bool], is_taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`answers` say whether it is refused."""
    monkeypatch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))
    said = iter([WITHOUT_A_TOKEN, *answers])
    monkeypatch.setattr(tokens, "_is_refused", lambda address, *, mode: next(said))
    if is_taken:
        with tokens.users_token("10.0.0.1:6379", insecure=False):
            pass
    else:
        with pytest.raises(UsageError, match="here is another"), tokens.users_token("10.0.0.1:6379", insecure=False):
            pass
    assert next(said, None) is None
