"""The report's page as text: self-contained, escaped, small, and refused where it cannot be made."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pandas as pd
import pytest

from paceline import cli
from paceline.config import DEFAULT_EVAL_EVERY
from paceline.errors import UsageError
from paceline.lab import report_page
from paceline.lab.analysis import summarise
from paceline.lab.frames import Frames
from paceline.lab.report_page import Page, render
from tests.lab import example_study, saved_study
from tests.lab.made import reaching
from tests.lab.made import study as study_of

MAX_BYTES = 10_000_000


class _Elements(HTMLParser):
    """Every element with its attributes, and the text of the page without scripts and styles."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self._inside = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._inside = tag
        self.text += " " * (tag in ("dd", "dt"))
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside not in ("script", "style"):
            self.text += data

    def count(self, tag: str) -> int:
        return sum(name == tag for name, _ in self.elements)


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("studies") / "first"
    saved_study.save(directory)
    return directory


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A study of one strategy, whose report is made quickly."""
    saved_study.save(tmp_path / "small", example_study.frames(study="small", num_strategies=1))
    return tmp_path / "small"


@pytest.fixture(scope="module")
def html(study: Path) -> str:
    report_page.write([study], study / "report.html")
    return (study / "report.html").read_text(encoding="utf-8")


def test_it_is_one_file_that_refers_to_nothing_outside(html: str) -> None:
    page = _Elements(html)
    for tag, attributes in page.elements:
        assert "src" not in attributes, tag
        address = attributes.get("href")
        assert address is None or address.startswith("#") or address == "data:,", (tag, address)
    assert "default-src 'none'" in html
    assert len(html.encode()) < MAX_BYTES


def test_figures_and_their_data_are_one_to_one(html: str) -> None:
    page = _Elements(html)
    held = re.search(r'<script type="application/json" id="charts">(.*?)</script>', html, re.DOTALL)
    assert held is not None
    charts = json.loads(held[1])
    ids = [attributes["id"] for tag, attributes in page.elements if (attributes.get("class") or "") == "plot"]
    assert sorted(ids) == sorted(charts)
    assert len(set(ids)) == len(ids)
    assert page.count("figure") == len(ids)
    assert sum(attributes.get("role") == "img" for _, attributes in page.elements) == len(ids)
    assert sum((attributes.get("class") or "") == "data" for _, attributes in page.elements) == len(ids)


def test_the_answer_comes_first_and_in_the_verdicts_words(html: str) -> None:
    text = " ".join(_Elements(html).text.split())
    assert "Reach accuracy 0.4 fastest with all-reduce on 10 workers" in text
    assert text.index("Reach accuracy") < text.index("Summary") < text.index("Speed-up") < text.index("How to repeat")
    assert "paceline compare /home/user/train.py --strategies all-reduce,ps-bsp:servers=2,ps-ssp,ps-asp" in text


def test_hostile_names_and_reasons_stay_text(html: str) -> None:
    hostile = "</script><script>alert(1)</script>\"' onload=alert(1) {{ 7 * 7 }}"
    frames = example_study.frames(study=hostile)
    for frame in vars(frames).values():
        frame["strategy"] = frame["strategy"].replace("ps-asp", hostile)
    frames.trials["reason"] = frames.trials["reason"].replace(example_study.HOSTILE, hostile)
    shown = render([Page(hostile, hostile, frames, [hostile], hostile, {hostile: hostile})])
    page = _Elements(shown)
    assert page.count("script") == _Elements(html).count("script")
    assert page.count("dt") == 2  # the one failure and the one fact
    assert all("onload" not in attributes for _, attributes in page.elements)
    assert page.text.count(hostile) >= 5
    held = re.search(r'<script type="application/json" id="charts">(.*?)</script>', shown, re.DOTALL)
    assert held is not None
    assert "&lt;script&gt;" in json.dumps(json.loads(held[1]))


def test_failures_and_missing_trials_are_listed_with_their_reasons() -> None:
    frames = example_study.frames(hostile=False)
    frames.trials.loc[0, ["status", "reason"]] = ["missing", ""]
    text = " ".join(_Elements(render([Page("x", "train.py", frames, [], "", {})])).text.split())
    assert "2 trials without a result" in text
    assert "ps-ssp-n5-s1 failed worker-3 died: exit code -9" in text
    assert "all-reduce-n1-s0 missing not run yet" in text
    assert "46 of 48 trials finished" in text


def test_the_command_repeats_the_study_elsewhere_and_settings_are_those_in_force(tmp_path: Path) -> None:
    trials = {("all-reduce", 1, 0): reaching(10.0)}
    made_study = study_of(tmp_path / "digits", trials)
    described = {"machine": {"processor": "x", "num_cores": 2, "memory_bytes": 0, "system": "Linux", "gpus": []}}
    described |= {"versions": {}, "git_commit": None, "started": "today", "working_directory": "/home/user/work"}
    (tmp_path / "digits" / "trials" / "all-reduce-n1-s0" / "manifest.json").write_text(json.dumps(described))
    page = report_page.page_of(made_study)
    assert f"--out {tmp_path.resolve() / 'digits-again'}" in page.command
    assert page.facts["Evaluation"] == f"every {DEFAULT_EVAL_EVERY.words}"
    assert page.facts["Working directory"] == "/home/user/work"
    untargeted = study_of(tmp_path / "other", trials, target=None)
    assert report_page.page_of(untargeted).facts["Evaluation"] == "at the end of each run"


def test_a_figure_that_cannot_be_drawn_is_named_on_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(subject: object, strategy: str) -> str:
        raise ValueError("<b>odd</b> numbers")

    monkeypatch.setattr("paceline.lab.figures.curves._iterations_title", broken)
    page = _Elements(render([Page("x", "train.py", example_study.frames(), [], "", {})]))
    said = " ".join(page.text.split())
    assert said.count("This figure could not be drawn: ValueError: <b>odd</b> numbers (curves.py:") == 2
    assert page.count("figure") > 5


def test_one_gradient_of_huge_staleness_leaves_it_small() -> None:
    frames = example_study.frames()
    odd = frames.staleness.drop_duplicates(["strategy", "workers"]).assign(staleness=100_000, count=1)
    stale = replace(frames, staleness=pd.concat([frames.staleness, odd], ignore_index=True))
    assert len(render([Page("x", "train.py", stale, [], "", {})])) < 6_500_000


def test_many_evaluations_leave_it_small() -> None:
    """1,000 evaluations of each of 48 trials are thinned to what a screen can show."""
    frames = example_study.frames()
    first = frames.evaluations.groupby("trial").head(1)
    rows = first.loc[first.index.repeat(1000)].reset_index(drop=True)
    rows["iteration"] = rows.groupby("trial").cumcount() + 1
    rows["time_s"] = rows["iteration"] * 0.1
    html = render([Page("x", "train.py", replace(frames, evaluations=rows), [], "", {})])
    assert len(html.encode()) < 7_000_000


def test_a_study_that_has_not_begun_has_a_report(tmp_path: Path) -> None:
    frames = example_study.frames()
    empty = {name: frame.iloc[:0] for name, frame in vars(frames).items()}
    empty["trials"] = frames.trials.iloc[:1].assign(status="missing", reason="", reached=False)
    empty["summary"] = summarise(empty["trials"])
    text = _Elements(render([Page("x", "train.py", Frames(**empty), [], "", {})])).text
    assert "0 of 1 trials finished" in text


def test_the_command_writes_beside_the_study_and_of_several_here(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _paceline(monkeypatch, "report", small) == 0
    assert capsys.readouterr().out.strip() == str(small / "report.html")
    assert (small / "report.html").exists()
    second = tmp_path / "second"
    saved_study.save(second, example_study.frames(study="second", num_strategies=1))
    monkeypatch.chdir(tmp_path)
    assert _paceline(monkeypatch, "report", small, second) == 0
    text = _Elements((tmp_path / "report.html").read_text(encoding="utf-8")).text
    assert "two studies side by side" in text


def test_it_goes_where_it_is_told_and_is_shown_if_asked(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[str] = []
    monkeypatch.setattr("webbrowser.open", shown.append)
    out = tmp_path / "new" / "own.html"
    assert _paceline(monkeypatch, "report", small, "--out", out, "--open") == 0
    assert out.exists()
    assert shown == [out.as_uri()]


def test_refusals_name_the_culprit(study: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="nowhere holds no study"):
        report_page.write([tmp_path / "nowhere"], tmp_path / "report.html")
    twin = tmp_path / study.name
    saved_study.save(twin)
    with pytest.raises(UsageError, match="two studies are named first"):
        report_page.write([study, twin], tmp_path / "report.html")
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"cannot write the report .*file"):
        report_page.write([study], tmp_path / "file" / "report.html")


def _paceline(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["paceline", *map(str, arguments)])
    try:
        cli.main()
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0
