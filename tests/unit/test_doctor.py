"""What `paceline doctor` finds wrong, and the remedy it names."""

from __future__ import annotations

import pytest

from paceline.cli import doctor


@pytest.mark.parametrize(("name", "installed"), [("torch", "1.13.1"), ("ray", "2.9.0")])
def test_library_of_an_unsupported_version(name: str, installed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor._library(name, installed).is_good
    monkeypatch.setattr(doctor, "version", lambda _: installed)
    finding = doctor._library(name, installed)
    assert not finding.is_good
    assert finding.remedy.startswith(f"install {name}")
