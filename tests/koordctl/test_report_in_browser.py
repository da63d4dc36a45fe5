"""`koordctl report` in a real browser: both colour schemes, a wide and a narrow window."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from koordctl.report import page
from tests.beds.browser import Page, browser
from tests.koordctl.looks import hour, look

pytestmark = pytest.mark.browser

_CHARTS = 7
"""All but that of the prediction, which is off on the node that is shown."""
_LUMINANCE = """
(property => {
  const colour = getComputedStyle(document.body)[property].match(/[0-9.]+/g).slice(0, 3);
  const [r, g, b] = colour.map(each => each / 255)
    .map(each => each <= 0.04045 ? each / 12.92 : ((each + 0.055) / 1.055) ** 2.4);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
})
"""
"""The relative luminance of WCAG 2.1, from 0 (black) to 1 (white)."""
_LINES = """
[...document.querySelectorAll('svg')].map(chart =>
  [...chart.querySelectorAll('path')].map(line => {
    const box = line.getBoundingClientRect(), frame = chart.getBoundingClientRect();
    return line.getTotalLength() > 0 && box.width > 0 && frame.height > 0
      && box.left >= frame.left - 2 && box.right <= frame.right + 2
      && box.top >= frame.top - 2 && box.bottom <= frame.bottom + 2
      && getComputedStyle(line).stroke.startsWith('rgb')
      && getComputedStyle(line).stroke != getComputedStyle(document.body).backgroundColor;
  }))
"""
"""For each chart, for each of its lines: is it drawn, within the chart, in a visible colour?"""


_CPU_COLOURS = """
Object.fromEntries([...document.querySelectorAll('.cpu')].map(cpu =>
  [cpu.textContent, getComputedStyle(cpu).borderTopColor]))
"""
_KEY_COLOURS = """
[...document.querySelectorAll('p .key')].map(key => getComputedStyle(key).backgroundColor)
"""


@pytest.fixture(scope="module")
def tab() -> Iterator[Page]:
    with browser() as made:
        yield made


@pytest.fixture
def report(tmp_path: Path) -> str:
    file = tmp_path / "report.html"
    file.write_text(page(hour(), look()))
    return file.as_uri()


def _show(tab: Page, address: str, *, scheme: str = "light", width: int = 1280) -> None:
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    tab.call("Emulation.setEmulatedMedia", features=features)
    tab.call(
        "Emulation.setDeviceMetricsOverride",
        width=width, height=800, deviceScaleFactor=1, mobile=False,
    )  # fmt: skip
    tab.show(address)


@pytest.mark.parametrize("width", [1280, 400], ids=["wide", "narrow"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_report_is_shown_whole(tab: Page, report: str, scheme: str, width: int) -> None:
    _show(tab, report, scheme=scheme, width=width)
    lines = tab.evaluate(_LINES)
    assert len(lines) == _CHARTS and all(lines), lines
    assert all(all(chart) for chart in lines), lines
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    # Nothing but the file itself was asked for, and nothing was wrong with it.
    asked = [event["request"]["url"] for event in tab.reported("Network.requestWillBeSent")]
    assert asked == [report]
    for trouble in ("Log.entryAdded", "Runtime.consoleAPICalled", "Runtime.exceptionThrown"):
        assert tab.reported(trouble) == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_report_follows_the_readers_colour_scheme(tab: Page, report: str, scheme: str) -> None:
    _show(tab, report, scheme=scheme)
    paper, ink = (
        tab.evaluate(f"{_LUMINANCE}('{property_}')") for property_ in ("backgroundColor", "color")
    )
    assert (paper > ink) == (scheme == "light")
    # WCAG 2.1's contrast of 7:1, its best grade.
    assert (max(paper, ink) + 0.05) / (min(paper, ink) + 0.05) >= 7


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_owners_of_cpus_have_colours_of_their_own(tab: Page, report: str, scheme: str) -> None:
    _show(tab, report, scheme=scheme)
    borders = tab.evaluate(_CPU_COLOURS)
    reserved, pod, shared = borders["0"], borders["1"], borders["2"]
    assert len({reserved, pod, shared}) == 3
    assert borders == {
        "0": reserved, "8": reserved, "1": pod, "3": pod, "2": shared, "9": shared,
    }  # fmt: skip
    # Each colour is explained below the CPUs.
    assert set(tab.evaluate(_KEY_COLOURS)) >= {reserved, pod, shared}


def test_a_page_with_faults_is_noticed(tab: Page, tmp_path: Path) -> None:
    """The checks above can fail: a script that throws, a picture from elsewhere, a wide line."""
    file = tmp_path / "bad.html"
    file.write_text(
        "<!DOCTYPE html><script>console.error('x'); throw new Error('y')</script>"
        "<img src='http://127.0.0.1:1/p.png'><div style='width: 3000px'>wide</div>"
        "<svg><path d='' stroke='red'/></svg>"
    )
    _show(tab, file.as_uri())
    assert tab.reported("Runtime.consoleAPICalled") and tab.reported("Runtime.exceptionThrown")
    asked = [event["request"]["url"] for event in tab.reported("Network.requestWillBeSent")]
    assert "http://127.0.0.1:1/p.png" in asked
    assert tab.evaluate("document.documentElement.scrollWidth") > 1280
    assert tab.evaluate(_LINES) == [[False]]
