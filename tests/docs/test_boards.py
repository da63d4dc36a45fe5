"""The Grafana boards: whole, and only with series and labels that koordlet serves."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import CollectorRegistry

from apis.qos import QoSClass
from hooks.subject import HostAppSubject
from koordlet.exposition.collector_metrics import pages
from koordlet.exposition.network_metrics import of_network
from koordlet.exposition.node_metrics import of_usage
from koordlet.exposition.report_metrics import of_predictors
from koordlet.exposition.strategy_metrics import Gauge, of_gauges
from koordlet.measurement.series import Metric, Series
from koordlet.prediction.peak import Both, Prediction, Predictions
from koordlet.qos.network.classes import BE
from koordlet.qos.network.status import NetworkQosStatus
from linux.htb import HtbClass
from tests.koordlet.exposition.test_collector_metrics import views
from tests.koordlet.exposition.test_metrics import scrapes

ROOT: Final = Path(__file__).parents[2]
BOARDS: Final = sorted((ROOT / "deploy" / "grafana").glob("*.json"))
_OF_STRATEGIES: Final = {
    "container_scaled_cfs_quota_us": {
        "pod_namespace",
        "pod_name",
        "container_id",
        "container_name",
    },
    "be_suppress_cpu_cores": {"type"},
    "be_suppress_ls_used_cpu_cores": set[str](),
    "be_suppress_be_used_cpu_cores": set[str](),
    "cpu_burst_raised_quotas": set[str](),
    "pressure_squeeze_ratio": {"resource"},
    "bandwidth_suppress_percent": {"domain"},
}
"""Series that exist while a strategy is at work, with their labels beside `node`. The strategies'
own tests have them."""
_OF_SOURCES: Final = {"koordlet_source_age_seconds": {"source"}}
"""Series of a node with kubelet, CRI or API server, which the simulated node lacks."""
_PRESSURES: Final = tuple(f"{of}.some.avg10" for of in ("cpu", "mem", "io"))
_DETAILS: Final = {
    Metric.CONTAINER_PSI: [("c-0", each) for each in _PRESSURES],
    Metric.POD_PSI: [("u-0", each) for each in _PRESSURES],
    Metric.NODE_PSI: [("", each) for each in _PRESSURES],
    Metric.CONTAINER_CPI: [("c-0", "cycle"), ("c-0", "instruction")],
    Metric.RESCTRL_LLC: [("BE", "0")],
}
_BANDWIDTH: Final = Series(Metric.RESCTRL_BANDWIDTH, "BE", "0/mbm_total_bytes")
_POD_CLASS: Final = 0x1234
_OF_PROMETHEUS: Final = {"instance", "job"}
"""Labels that the one who scrapes adds."""


class Query(NamedTuple):
    title: str
    text: str
    legend: str


def queries(board: Path) -> list[Query]:
    return [
        Query(panel["title"], target["expr"], target["legendFormat"])
        for panel in json.loads(board.read_text())["panels"]
        for target in panel["targets"]
    ]


def _gauges() -> Iterator[Gauge]:
    for name, labels in _OF_STRATEGIES.items():
        yield name, tuple((label, "x") for label in sorted(labels)), 1.0
    found = (HtbClass(BE, 0, 1, 2, 0, 0, 1500), HtbClass(_POD_CLASS, 0, 1, 2, 0, 0, 1500))
    yield from of_network(NetworkQosStatus(on=True, classes={each.minor: each for each in found}))
    either = Prediction(Both(1, 1), Both(1, 1))
    yield from of_predictors(Predictions(by_pod=either, by_class=either))
    app = HostAppSubject("nginx", QoSClass.LS, "system/nginx", "koord-prod")
    yield from of_usage(lambda metric: {("nginx", ""): 1.0}, [app])


class _Gauges:
    """The gauges of strategies, prediction and network QoS, as a scrape has them."""

    def collect(self) -> Iterator[Family]:
        yield from of_gauges("n1", _gauges())


def _measured(metric: Metric) -> dict[tuple[str, str], float]:
    return dict.fromkeys(_DETAILS.get(metric, [("sda", "")]), 1.0)


@pytest.fixture(scope="module")
def served() -> dict[str, dict[str, set[str]]]:
    """Each sample's name with its labels and their values, of a daemon with all that it can have:
    a whole one on a simulated kernel, samples of each collector, gauges of each strategy."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Gauges())
    text = asyncio.run(asyncio.wait_for(scrapes(), 60))["/metrics"]
    text += generate_latest(registry).decode()
    text += b"".join(pages("n1", views(), _measured, {_BANDWIDTH: 1})).decode()
    found: dict[str, dict[str, set[str]]] = {
        name: {label: set() for label in labels} for name, labels in _OF_SOURCES.items()
    }
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = found.setdefault(sample.name, {})
            for label, value in sample.labels.items():
                labels.setdefault(label, set()).add(value)
    return found


_NAME: Final = re.compile(r"\b((?:koordlet|process)_[a-z_]+)(?:\{([^}]*)\})?")
_MATCHER: Final = re.compile(r'(\w+)(=~|=)"([^"]*)"')
_GROUPED: Final = re.compile(r"\b(?:sum|count|max)(?: by \(([a-z_, ]*)\) )?\(")
_LISTS: Final = re.compile(r"\b(?:by|on|ignoring|group_left) \(([a-z_, ]*)\)")


def faults(query: Query, served: dict[str, dict[str, set[str]]]) -> list[str]:
    """Return what is wrong with a query."""
    found: list[str] = []
    labels = set(_OF_PROMETHEUS)
    for name, matchers in _NAME.findall(query.text):
        if name not in served:
            found.append(f"no series {name}")
            continue
        labels |= served[name].keys()
        for label, how, value in _MATCHER.findall(matchers):
            values = served[name].get(label)
            if values is None:
                found.append(f"{name} has no label {label}")
            elif how == "=" and value not in values:
                found.append(f"{name} has no {label} {value}, but {sorted(values)}")
    for names in _LISTS.findall(query.text):
        found += [
            f"no series has a label {each}"
            for each in names.split(", ")
            if each and each not in labels
        ]
    if (grouped := _GROUPED.search(query.text)) is not None:
        labels = set((grouped[1] or "").split(", "))
    found += [
        f"no label {each} for the legend"
        for each in re.findall(r"\{\{(\w+)\}\}", query.legend)
        if each not in labels
    ]
    return found


@pytest.mark.parametrize("board", BOARDS, ids=lambda path: path.name)
def test_every_query_asks_for_series_and_labels_that_are_served(
    board: Path, served: dict[str, dict[str, set[str]]]
) -> None:
    asked = queries(board)
    assert len(asked) >= 20
    wrong = {(each.title, each.text): found for each in asked if (found := faults(each, served))}
    assert wrong == {}


def test_series_that_are_not_served_here_are_in_the_code() -> None:
    rooms = ("koordlet/qos/strategies", "koordlet/exposition")
    files = [path for room in rooms for path in sorted((ROOT / room).glob("*.py"))]
    sources = "\n".join(path.read_text() for path in files)
    named = [*_OF_STRATEGIES, *_OF_SOURCES]
    assert [name for name in named if f'"{name}"' not in sources] == []


def test_faults_of_a_query_are_noticed(served: dict[str, dict[str, set[str]]]) -> None:
    def of(text: str, legend: str = "") -> list[str]:
        return faults(Query("", text, legend), served)

    assert of('koordlet_node_disk_busy{node=~"$node"}', "{{node}} {{device}}") == []
    assert of("koordlet_node_disk_bsy") == ["no series koordlet_node_disk_bsy"]
    assert of('koordlet_node_disk_busy{disk="sda"}') == [
        "koordlet_node_disk_busy has no label disk"
    ]
    assert of('koordlet_node_psi{psi_resource_type="disk"}') == [
        "koordlet_node_psi has no psi_resource_type disk, but ['cpu', 'io', 'mem']"
    ]
    assert of("koordlet_strategy_on", "{{node}}") == ["no label node for the legend"]
    assert of("sum by (le, method) (koordlet_nri_hook_duration_seconds_bucket)", "{{node}}") == [
        "no label node for the legend"
    ]
    assert of("sum(koordlet_strategy_on)", "{{strategy}}") == ["no label strategy for the legend"]
    assert of("topk(10, koordlet_strategy_on)", "{{strategy}}") == []
    assert of("koordlet_pods * on (instance, host) koordlet_start_time") == [
        "no series has a label host"
    ]


@pytest.mark.parametrize("board", BOARDS, ids=lambda path: path.name)
def test_every_query_is_about_the_nodes_that_are_chosen(board: Path) -> None:
    for each in queries(board):
        assert 'node=~"$node"' in each.text, each


@pytest.mark.parametrize("board", BOARDS, ids=lambda path: path.name)
def test_a_board_is_whole(board: Path) -> None:
    tree: dict[str, Any] = json.loads(board.read_text())
    panels = tree["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    places = {(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels}
    assert len(places) == len(panels)
    for panel in panels:
        assert panel["title"]
        assert panel["datasource"]["uid"] == "${datasource}"
        assert all(
            target["expr"].count("(") == target["expr"].count(")") for target in panel["targets"]
        )


def test_the_board_of_the_cluster_shows_sums_and_single_nodes() -> None:
    """A line for each node of a large cluster could not be read."""
    (board,) = [path for path in BOARDS if path.name == "koordlet-cluster.json"]
    unbounded = [
        each.text
        for each in queries(board)
        if not each.text.startswith(("sum", "count", "topk(10, ", "bottomk(10, ", "histogram_"))
    ]
    assert unbounded == []


def test_boards_can_be_told_apart() -> None:
    trees = [json.loads(path.read_text()) for path in BOARDS]
    assert len({tree["uid"] for tree in trees}) == len({tree["title"] for tree in trees}) == 2


def test_there_is_a_board_and_it_has_a_panel_for_each_kind_of_measurement() -> None:
    assert BOARDS
    text = "\n".join(each.text for board in BOARDS for each in queries(board))
    for part in (
        "node_disk_", "node_filesystem_", "node_network_", "node_gpu_", "resctrl_", "container_cpi",
        "network_qos_", "node_psi", "pod_psi",
    ):  # fmt: skip
        assert f"koordlet_{part}" in text, part
