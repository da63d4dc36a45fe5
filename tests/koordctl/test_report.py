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
        "CPU burst: containers with a raised quota",
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


# --- the places of lines, numbers and times in a chart ------------------------------------------

_TIMES = [0.0, 60.0, 120.0]


def _figures(series: dict[str, Any], **changes: Any) -> dict[str, str]:
    """Return the charts of this history by their title, and what else `changes` changes of it."""
    history = {"step_s": 60.0, "times": _TIMES, "series": series, "notes": [], **changes}
    found = re.findall(r"<figure><h2>([^<]*)</h2>(.*?)</figure>", page(history, look()))
    return dict(found)


def _lines(figure: str) -> dict[str, str]:
    """Return the path of each line of a chart by its label, as its colour and the key say."""
    paths = re.findall(r'<path d="([^"]*)" fill="none" stroke="(var[^"]*)"', figure)
    keys = re.findall(r'<span class="key" style="background:(var[^"]*)"></span>([^<]*)', figure)
    assert [colour for _, colour in paths] == [colour for colour, _ in keys]
    return {label: path for (path, _), (_, label) in zip(paths, keys, strict=True)}


_CPU = "CPU used, in cores"
_MEMORY = "Memory used, without page cache, in GiB"
_BE = "Best effort: the cores that it may use, and uses"


@pytest.mark.usefixtures("terminal")
def test_a_chart_is_drawn_whole() -> None:
    """Values from 0 at 182 to the capacity of 16 at 4; times from 56 to 960."""
    at = {0: "182.0", 4: "137.5", 8: "93.0", 12: "48.5", 16: "4.0"}
    grid = "".join(
        f'<line class="axis" x1="56" x2="960" y1="{y}" y2="{y}"/>'
        f'<text x="50" y="{y}" dy="4" text-anchor="end">{value}</text>'
        for value, y in at.items()
    )
    times = "".join(
        f'<text x="{x}" y="200" text-anchor="{anchor}">{text}</text>'
        for x, anchor, text in (
            ("56.0", "start", "00:00:00"),
            ("282.0", "middle", "00:00:30"),
            ("508.0", "middle", "00:01:00"),
            ("734.0", "middle", "00:01:30"),
            ("960.0", "end", "00:02:00"),
        )
    )
    assert _figures({"cpu.node": [0.0, 8.0, 16.0]}) == {
        _CPU: f'<svg viewBox="0 0 960 206" role="img" aria-label="{_CPU}">{grid}{times}'
        '<path d="M56.0,182.0L508.0,93.0L960.0,4.0" fill="none" stroke="var(--c3)"'
        ' stroke-width="1.6"/></svg>'
        '<figcaption><span class="key" style="background:var(--c3)"></span>node</figcaption>'
    }


@pytest.mark.usefixtures("terminal")
@pytest.mark.parametrize(
    ("values", "highest"), [([0.0, 1.0, 16.5], "16.5"), ([32.0, 1.0, 2.0], "32")]
)
def test_a_chart_reaches_above_the_capacity_where_values_do(
    values: list[float], highest: str
) -> None:
    figure = _figures({"cpu.node": values})[_CPU]
    assert f'y="4.0" dy="4" text-anchor="end">{highest}</text>' in figure
    assert ",4.0" in _lines(figure)["node"]


def test_memory_is_drawn_in_gib_up_to_the_capacity() -> None:
    gib = float(1 << 30)
    figure = _figures({"memory.node": [0.0, 32 * gib, None], "memory.system": [64 * gib] * 3})
    assert _lines(figure[_MEMORY]) == {
        "system": "M56.0,4.0L508.0,4.0L960.0,4.0",
        "node": "M56.0,182.0L508.0,93.0",
    }
    assert 'y="4.0" dy="4" text-anchor="end">64</text>' in figure[_MEMORY]


def test_a_chart_without_a_capacity_ends_at_its_largest_value_and_of_zeros_at_one() -> None:
    series = {"psi.cpu.some": [0.0, 0.0, 0.0], "be.limit": [1.0, 2.0, 5.0]}
    figures = _figures(series)
    assert 'y="4.0" dy="4" text-anchor="end">5</text>' in figures[_BE]
    [pressure] = [text for title, text in figures.items() if title.startswith("Pressure")]
    assert 'y="4.0" dy="4" text-anchor="end">1</text>' in pressure
    assert _lines(pressure) == {"cpu.some": "M56.0,182.0L508.0,182.0L960.0,182.0"}


def test_a_line_ends_where_a_value_is_missing_and_begins_again_after_it() -> None:
    values = [None, 16.0, None, 0.0, 8.0, None]
    times = [0.0, 20.0, 40.0, 60.0, 80.0, 100.0]
    figure = _figures({"cpu.node": values, "cpu.system": [None] * 6}, times=times)[_CPU]
    assert _lines(figure) == {"system": "", "node": "M236.8,4.0M598.4,182.0L779.2,93.0"}


def test_moments_that_are_one_leave_the_chart_at_its_beginning() -> None:
    figure = _figures({"cpu.node": [0.0, 16.0]}, times=[5.0, 5.0])[_CPU]
    assert _lines(figure) == {"node": "M56.0,182.0L56.0,4.0"}


def test_with_one_moment_there_is_no_chart() -> None:
    assert _figures({"cpu.node": [1.0]}, times=[5.0]) == {}


def test_each_class_keeps_its_colour_and_has_a_line_where_it_was_measured() -> None:
    series = {f"cpu.{name}": [1.0] * 3 for name in ("LS", "BE", "LSR", "LSE", "system", "node")}
    figure = _figures(series)[_CPU]
    keys = re.findall(r'background:var\(--(c\d)\)"></span>([^<]*)', figure)
    assert keys == [
        ("c4", "LSE"),
        ("c2", "LSR"),
        ("c0", "LS"),
        ("c1", "BE"),
        ("c5", "system"),
        ("c3", "node"),
    ]
    del series["cpu.LSR"]
    assert ">LSR<" not in _figures(series)[_CPU]


def test_lines_beyond_the_sixth_are_dashed_with_the_colours_again() -> None:
    figures = _figures({f"psi.{name}": [1.0] * 3 for name in "abcdefgh"})
    [figure] = [text for title, text in figures.items() if title.startswith("Pressure")]
    strokes = re.findall(r'stroke="var\(--(c\d)\)" stroke-width="1.6"([^/]*)/>', figure)
    assert strokes == [
        *((f"c{number}", "") for number in range(6)),
        ("c0", ' stroke-dasharray="5 3"'),
        ("c1", ' stroke-dasharray="5 3"'),
    ]
    assert list(_lines(figure)) == list("abcdefgh")


def test_best_effort_has_a_line_for_each_kind_of_suppression() -> None:
    series = {
        "be_suppress_cpu_cores{type=cpuset,node=n1}": [3.0] * 3,
        "be_suppress_cpu_cores": [4.0] * 3,
        "be_suppress_ls_used_cpu{type=cpuset}": [5.0] * 3,
        "cpu.BE": [2.0] * 3,
        "be.limit": [1.0] * 3,
    }
    figure = _figures(series)[_BE]
    keys = re.findall(r'background:var\(--(c\d)\)"></span>([^<]*)', figure)
    assert keys == [
        ("c0", "may use"),
        ("c1", "uses"),
        ("c2", "left by suppression"),
        ("c3", "left by suppression: cpuset, n1"),
    ]


def test_bursts_are_drawn_by_the_number_of_raised_quotas() -> None:
    figures = _figures({"cpu_burst_raised_quotas": [0.0, 2.0, 1.0], "cpu.node": [1.0] * 3})
    figure = figures["CPU burst: containers with a raised quota"]
    assert _lines(figure) == {"raised": "M56.0,182.0L508.0,4.0L960.0,93.0"}
    assert list(_figures({"cpu.node": [1.0] * 3})) == [
        _CPU
    ]  # without CPU burst, or a daemon of before


def test_a_prediction_has_the_unit_of_what_it_predicts() -> None:
    gib = float(1 << 30)
    series = {
        "predicted.cpu.prod": [4.0] * 3,
        "cpu.prod": [2.0] * 3,
        "predicted.memory.prod": [4 * gib] * 3,
    }
    start = "Prediction: the peak that is predicted for prod, and what prod used, in "
    figures = {t.removeprefix(start): f for t, f in _figures(series).items() if start in t}
    assert list(figures) == ["cores", "GiB"]
    straight = "M56.0,{0}L508.0,{0}L960.0,{0}"
    assert _lines(figures["cores"]) == {
        "predicted": straight.format("4.0"),
        "used": straight.format("93.0"),
    }
    assert _lines(figures["GiB"]) == {"predicted": straight.format("4.0")}
    assert 'y="4.0" dy="4" text-anchor="end">4</text>' in figures["GiB"]


@pytest.mark.usefixtures("terminal")
@pytest.mark.parametrize(
    ("times", "span"),
    [
        ([], "0 seconds"),
        ([7.0], "0 seconds"),
        ([7.0, 8.0], "1 seconds"),
        ([0.0, 89.0], "89 seconds"),
        ([0.0, 90.0], "2 minutes"),
        ([60.0, 100.0, 3660.0], "60 minutes"),
    ],
)
def test_the_page_says_which_time_it_shows(times: list[float], span: str) -> None:
    history = {"step_s": 2.5, "times": times, "series": {}, "notes": []}
    text = page(history, look() | {"at": 1_000_000_000.0, "name": "<n>"})
    assert "<h1>Node &lt;n&gt;</h1>" in text and "<title>Node &lt;n&gt;</title>" in text
    assert (
        f'<p class="soft">The last {span} up to 2001-09-09 01:46:40 UTC, a point every 2.5 s.</p>'
        in text
    )


def _table(text: str, title: str) -> list[list[str]]:
    """Return the cells of the table below a title, its header first."""
    found = re.search(
        f'<h2>{title}</h2><div class="wide"><table>(.*?)</table></div>', text, re.DOTALL
    )
    assert found, title
    return [
        re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row)
        for row in re.findall("<tr>(.*?)</tr>", found[1])
    ]


@pytest.mark.usefixtures("terminal")
def test_tables_of_a_page_are_shown_whole() -> None:
    note = {"strategy": "CPUBurst", "reason": "Scale", "obj": "Pod a/b", "message": "x <y>"}
    notes = [{**note, "at": 60.0}, {**note, "at": 3600.0, "message": "later"}]
    answer = look()
    answer["strategies"] = [
        {"name": "a", "on": True, "problem": "p", "summary": "s", "why": "w"},
        {"name": "b", "on": True, "problem": "", "summary": "s", "why": "w"},
        {"name": "c", "on": False, "problem": "", "summary": "", "why": "w"},
        {"name": "d", "on": True, "problem": "", "summary": "", "why": ""},
    ]
    answer["pods"].append(
        {"namespace": "a", "name": "b", "class": "", "cpu": None, "memory": None, "throttled": None}
    )
    text = page({"step_s": 1.0, "times": [], "series": {}, "notes": notes}, answer)
    assert _table(text, "Strategies") == [
        ["strategy", "state", "what it does now, and why"],
        ["a", "on", "p"],
        ["b", "on", "s"],
        ["c", "off", "w"],
        ["d", "on", "at rest"],
    ]
    assert _table(text, "What the strategies did") == [
        ["at", "strategy", "reason", "object", "message"],
        ["01:00:00", "CPUBurst", "Scale", "Pod a/b", "later"],
        ["00:01:00", "CPUBurst", "Scale", "Pod a/b", "x &lt;y&gt;"],
    ]
    assert _table(text, "Pods now") == [
        ["pod", "class", "CPU, cores", "memory, MiB", "throttled"],
        ["default/web-0", "LS", "5.10", "5222", "25%"],
        ["batch/&lt;script&gt;alert(1)&lt;/script&gt;", "BE", "2.90", "2970", "0%"],
        ["default/db-0", "LSR", "2.00", "2048", "-"],
        ["a/b", "", "-", "-", "-"],
    ]


def test_what_there_is_nothing_of_has_no_title() -> None:
    answer = look() | {"strategies": [], "pods": [], "topology": None}
    text = page({"step_s": 1.0, "times": [], "series": {}, "notes": []}, answer)
    assert re.findall("<h2>", text) == []
    assert "None" not in text


@pytest.mark.parametrize(
    ("owner", "colour", "kind", "title"),
    [
        ("LS", "c0", "LS", "own (LS)"),
        ("BE", "c1", "BE", "own (BE)"),
        ("SYSTEM", "c5", "SYSTEM", "own (SYSTEM)"),
        ("reserved", "c6", "reserved", "own (reserved)"),
        ("new", "c1", "new", "own (new)"),
        ("", "c1", "class not known", "own (class not known)"),
    ],
)
def test_a_cpu_has_the_colour_of_its_first_owner(
    owner: str, colour: str, kind: str, title: str
) -> None:
    answer = look()
    owners = [
        {"name": "own", "class": owner, "uid": "", "why": ""},
        {"name": "second", "class": "LSE", "uid": "", "why": ""},
    ]
    answer["topology"]["nodes"] = [{"id": 3, "cpus": [{"id": 5, "core": 4, "owners": owners}]}]
    text = page({"step_s": 1.0, "times": [], "series": {}, "notes": []}, answer)
    assert (
        '<tr><td class="numa">NUMA node 3</td><td><span class="cpu"'
        f' style="border-color:var(--{colour})"'
        f' title="CPU 5, core 4: {title}; second (LSE)">5</span></td></tr></table></div>'
        f'<p><span class="key" style="background:var(--{colour})"></span>{kind}</p>'
    ) in text
