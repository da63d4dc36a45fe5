"""The collectors' series in Prometheus' format, read back with the client's own parser."""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client.parser import text_string_to_metric_families

from apis.qos import KubeQoS
from hooks.subject import ContainerSubject, PodSubject, make_pod
from koordlet.exposition.collector_metrics import pages
from koordlet.measurement.series import Metric, Series
from koordlet.state.merging import PodView

Samples = dict[Series, float]
Shown = list[tuple[str, dict[str, str], float]]
WHOSE = {"node": "n1", "pod_uid": "u-0", "pod_name": "web-0", "pod_namespace": "shop"}
MAIN = {**WHOSE, "container_id": "c-0", "container_name": "main"}


def views(count: int = 1, *, namespace: str = "shop") -> list[PodView]:
    made: list[PodView] = []
    for number in range(count):
        pod = make_pod(
            namespace=namespace,
            name=f"web-{number}",
            uid=f"u-{number}",
            labels={},
            annotations={},
            kube_qos=KubeQoS.BURSTABLE,
        )
        container = ContainerSubject(pod, "main", f"c-{number}")
        made.append(PodView(pod, PodSubject(pod), (), (container,), (container,)))
    return made


def shown(
    samples: Samples, counts: Mapping[Series, int] | None = None, pods: list[PodView] | None = None
) -> Shown:
    def latest(metric: Metric) -> dict[tuple[str, str], float]:
        return {(s.of, s.detail): value for s, value in samples.items() if s.metric is metric}

    text = b"".join(pages("n1", views() if pods is None else pods, latest, counts or {}))
    families = list(text_string_to_metric_families(text.decode()))
    assert len({family.name for family in families}) == len(families)
    return [(one.name, one.labels, one.value) for each in families for one in each.samples]


def psi(resource: str, precision: str, degree: str, supported: str) -> dict[str, str]:
    return {
        "psi_resource_type": resource,
        "psi_precision": precision,
        "psi_degree": degree,
        "cpu_full_supported": supported,
    }


def test_pressure() -> None:
    assert shown(
        {
            Series(Metric.CONTAINER_PSI, "c-0", "cpu.some.avg10"): 1.5,
            Series(Metric.CONTAINER_PSI, "c-0", "cpu.some.stall"): 9.0,
            Series(Metric.CONTAINER_PSI, "c-0", "mem.full.avg300"): 0.25,
            Series(Metric.POD_PSI, "u-0", "io.some.avg60"): 2.0,
            Series(Metric.POD_PSI, "u-0", "io.full.avg60"): 1.0,
            Series(Metric.NODE_PSI, "", "mem.some.avg10"): 3.0,
        }
    ) == [
        ("koordlet_container_psi", {**MAIN, **psi("cpu", "avg10", "some", "false")}, 1.5),
        ("koordlet_container_psi", {**MAIN, **psi("mem", "avg300", "full", "true")}, 0.25),
        ("koordlet_pod_psi", {**WHOSE, **psi("io", "avg60", "some", "true")}, 2.0),
        ("koordlet_pod_psi", {**WHOSE, **psi("io", "avg60", "full", "true")}, 1.0),
        ("koordlet_node_psi", {"node": "n1", **psi("mem", "avg10", "some", "false")}, 3.0),
    ]


def test_cpi_and_resctrl() -> None:
    local = Series(Metric.RESCTRL_BANDWIDTH, "BE", "1/mbm_local_bytes")
    assert shown(
        {
            Series(Metric.CONTAINER_CPI, "c-0", "cycle"): 2000.0,
            Series(Metric.CONTAINER_CPI, "c-0", "instruction"): 1000.0,
            Series(Metric.RESCTRL_LLC, "BE", "1"): 4096.0,
            local: 5.0,
        },
        {local: 2**60},
    ) == [
        ("koordlet_container_cpi", {**MAIN, "cpi_field": "cycles"}, 2000.0),
        ("koordlet_container_cpi", {**MAIN, "cpi_field": "instructions"}, 1000.0),
        ("koordlet_resctrl_llc_occupancy", {"node": "n1", "cache_id": "1", "qos": "BE"}, 4096.0),
        (
            "koordlet_resctrl_memory_bandwidth",
            {"node": "n1", "cache_id": "1", "qos": "BE", "mb_type": "mbm_local_bytes"},
            float(2**60),
        ),
    ]


def test_the_nodes_series() -> None:
    assert shown(
        {
            Series(Metric.NODE_DISK_BUSY, "sda"): 0.5,
            Series(Metric.NODE_FILESYSTEM_USED, 'a "quoted"\\path'): 7.0,
            Series(Metric.NODE_GPU_CORE, "GPU-0", "0"): 40.0,
        }
    ) == [
        ("koordlet_node_disk_busy", {"node": "n1", "device": "sda"}, 0.5),
        (
            "koordlet_node_filesystem_used_bytes",
            {"node": "n1", "mount_point": 'a "quoted"\\path'},
            7.0,
        ),
        ("koordlet_node_gpu_core_usage", {"node": "n1", "gpu_device_uuid": "GPU-0"}, 40.0),
    ]


def test_samples_of_what_has_ended_are_not_shown() -> None:
    samples = {
        Series(Metric.CONTAINER_PSI, "c-9", "cpu.some.avg10"): 1.0,
        Series(Metric.CONTAINER_CPI, "c-9", "cycle"): 1.0,
    }
    assert shown(samples) == []
    assert shown({}) == []


def test_many_groups_come_in_several_pages_and_all_of_them_come() -> None:
    pods = views(50)
    samples = {
        Series(Metric.CONTAINER_PSI, f"c-{number}", "cpu.some.avg10"): float(number)
        for number in range(50)
    }
    values = [value for _, _, value in shown(samples, pods=pods)]
    assert values == [float(number) for number in range(50)]
    by_metric = {(series.of, series.detail): value for series, value in samples.items()}
    made = pages("n1", pods, lambda metric: by_metric if metric is Metric.CONTAINER_PSI else {}, {})
    assert sum(b"container_psi{" in page for page in made) == 4
