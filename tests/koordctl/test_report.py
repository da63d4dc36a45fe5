"""`koordctl report`: a whole page, without network, with every value escaped."""

from __future__ import annotations

import json
import re
import time
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from koordctl.client import Client
from koordctl.main import main
from koordctl.report import page
from tests.koordctl.looks import hour, look, look_at_an_older_daemon

_VOID = {"meta", "line", "path", "br"}


class _Strict(HTMLParser):
    """Checks that every element is closed in order, and collects texts and attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.texts: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in _VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in _VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def _parsed(text: str) -> _Strict:
    parser = _Strict()
    parser.feed(text)
    parser.close()
    assert parser.open == []
    return parser


def test_the_page_is_whole_and_asks_nothing_of_a_network() -> None:
    text = page(hour(), look())
    parser = _parsed(text)
    assert "script" not in parser.tags and "link" not in parser.tags
    assert not [name for name, _ in parser.attributes if name in ("src", "href")]
    assert "http" not in text and "url(" not in text and "@import" not in text
    assert "prefers-color-scheme: dark" in text


def test_texts_are_shown_as_texts() -> None:
    parser = _parsed(page(hour(), look()))
    assert "batch/<script>alert(1)</script>" in parser.texts
    assert "3 CPUs <because of load>" in parser.texts


def test_it_shows_charts_strategies_notes_cpus_and_pods() -> None:
    text = page(hour(), look())
    for title in (
        "CPU used, in cores",
        "Memory used, without page cache, in GiB",
        "Best effort: the cores that it may use, and uses",
        "Pressure: share of time in which tasks waited, in percent",
        "Prediction: the peak that is predicted for prod, and what prod used, in cores",
        "Prediction: the peak that is predicted for prod, and what prod used, in GiB",
        "CPUs and who owns them",
        "Strategies",
        "What the strategies did",
        "Pods now",
    ):
        assert f">{title}<" in text, title
    assert "left by suppression: cpuset" in text


def test_notes_have_the_time_of_day() -> None:
    past = hour()
    at = time.strftime("%H:%M:%S", time.localtime(past["notes"][0]["at"]))
    texts = _parsed(page(past, look())).texts
    assert texts[texts.index(at) + 1] == "BECPUSuppress"


def test_each_cpu_has_its_owners_and_each_owner_its_cpus() -> None:
    text = page(hour(), look())
    for title in (
        "CPU 0, core 0: node reservation (reserved)",
        "CPU 1, core 1: default/db-0 (LSR)",
        "CPU 2, core 2: shared",
        "CPU 3, core 3: default/db-0 (LSR); system class (SYSTEM)",
    ):
        assert f'title="{title}"' in text, title
    colours = dict(
        re.findall(r'border-color:var\(--(\w+)\)" title="CPU \d+, core \d+: (.+?)"', text)
    )
    assert len(colours) == 3  # of the reservation, of LSR pods, of shared CPUs
    for colour in colours:
        assert f'<span class="key" style="background:var(--{colour})">' in text
        assert f"--{colour}: #" in text
    rows = re.findall(r"<tr>((?:<td>[^<]*</td>){4})</tr>", text)
    owners = [re.findall(r"<td>([^<]*)</td>", row) for row in rows]
    assert [row for row in owners if row[1] != "BECPUSuppress"] == [
        ["0,8", "node reservation", "reserved",
         "annotation node.koordinator.sh/reservation of the Node"],
        ["1,3", "default/db-0", "LSR", "annotation scheduling.koordinator.sh/resource-status"],
        ["3", "system class", "SYSTEM",
         "annotation node.koordinator.sh/system-qos-resource of the Node: exclusive"],
        ["2,9", "shared", "-", "pods without CPUs of their own"],
    ]  # fmt: skip


def test_without_an_owner_there_is_no_table_of_owners() -> None:
    answer = look()
    for node in answer["topology"]["nodes"]:
        for cpu in node["cpus"]:
            cpu["owners"] = []
    text = page(hour(), answer)
    assert 'title="CPU 0, core 0: shared"' in text
    assert "<th>owner</th>" not in text


def test_an_older_daemons_cpus_are_shown_without_owners() -> None:
    text = page(hour(), look_at_an_older_daemon())
    assert 'title="CPU 0, core 0: owner not known"' in text
    assert ">shared<" not in text and ": shared" not in text
    assert "</span>not known</p>" in text
    assert ">owner</th>" not in text


def test_prediction_stands_beside_what_came() -> None:
    found = hour()
    text = page(found, look())
    [chart] = re.findall(r"<figure><h2>Prediction: [^<]* in GiB</h2>.*?</figure>", text)
    assert [chart.count(label) for label in (">predicted<", ">used<")] == [1, 1]
    assert len(re.findall("<path ", chart)) == 2
    del found["series"]["predicted.cpu.prod"], found["series"]["predicted.memory.prod"]
    assert "Prediction" not in page(found, look())


def test_lines_stay_inside_their_chart_and_break_where_a_value_is_missing() -> None:
    text = page(hour(), look())
    paths = re.findall(r'<path d="([^"]+)"', text)
    assert any(path.count("M") == 2 for path in paths)  # cpu.LS has a gap
    for path in paths:
        for x, y in re.findall(r"[ML]([-\d.]+),([-\d.]+)", path):
            assert 56 <= float(x) <= 960 and 0 <= float(y) <= 200


def test_a_daemon_that_has_just_started_has_a_page_without_charts() -> None:
    empty = {"step_s": 10.0, "times": [], "series": {}, "notes": []}
    answer = look() | {"topology": None}
    parser = _parsed(page(empty, answer))
    assert "svg" not in parser.tags
    assert "Strategies" in parser.texts


def test_the_command_writes_the_page_or_prints_what_it_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answers: dict[str, Any] = {"/history": hour(), "/top": look()}
    monkeypatch.setattr(Client, "get", lambda _, path: answers[path])
    assert main(["report", "-o", "json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "history": answers["/history"],
        "now": answers["/top"],
    }
    assert main(["report"]) == 0
    assert capsys.readouterr().out == page(hour(), look())
    path = tmp_path / "page.html"
    assert main(["report", "--file", str(path)]) == 0
    assert capsys.readouterr().out == f"wrote {path}\n"
    assert path.read_text() == page(hour(), look())
    assert path.stat().st_mode & 0o777 == 0o600
    assert main(["report", "--file", str(tmp_path / "no" / "page.html")]) == 2
    assert f"cannot write {tmp_path}/no/page.html" in capsys.readouterr().err
    answers["/top"] = {**look(), "measured": False}
    assert main(["report"]) == 2


def test_a_strategy_that_is_off_is_shown_so() -> None:
    answer = look()
    name = answer["strategies"][0]["name"]
    answer["strategies"][0]["on"] = False
    texts = _parsed(page(hour(), answer)).texts
    assert texts[texts.index(name) + 1] == "off"
