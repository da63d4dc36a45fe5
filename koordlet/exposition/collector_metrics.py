"""The series of the collectors: pressure, CPI, resctrl's monitoring, disks, interfaces, GPUs.

Names and labels of upstream's series are upstream's: docs/facts/koordlet.md, "Metrics". A node has
some 6,000 series of pressure, so the text is made in pages that take about a millisecond each; who
serves it does other work between them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final

from koordlet.measurement.series import Metric, Series
from koordlet.state.merging import PodView

Latest = Callable[[Metric], Mapping[tuple[str, str], float]]
"""From a metric to the newest sample of each object, by `Series.of` and `Series.detail`."""

_GROUPS_OF_PAGE: Final = 16
"""Groups of one page; a group has at most 18 series of pressure."""
_AVERAGES: Final = ("avg10", "avg60", "avg300")
_CPI_FIELDS: Final = {"cycle": "cycles", "instruction": "instructions"}
"""The detail of a series -> upstream's value of the label cpi_field."""
_OF_NODE: Final = (
    (Metric.NODE_DISK_READ, "device", "Bytes read per second."),
    (Metric.NODE_DISK_WRITE, "device", "Bytes written per second."),
    (Metric.NODE_DISK_BUSY, "device", "Part of the time with a request under way."),
    (Metric.NODE_FILESYSTEM_SIZE, "mount_point", "Bytes of the file system."),
    (Metric.NODE_FILESYSTEM_USED, "mount_point", "Bytes in use of the file system."),
    (Metric.NODE_NETWORK_RECEIVE, "interface", "Bytes received per second."),
    (Metric.NODE_NETWORK_SEND, "interface", "Bytes sent per second."),
    (Metric.NODE_GPU_CORE, "gpu_device_uuid", "Percent of the GPU in use."),
    (Metric.NODE_GPU_MEMORY, "gpu_device_uuid", "Bytes of the GPU's memory in use."),
)
"""Series of the node: metric, the label that names the object, help."""


def pages(
    node: str, pods: Iterable[PodView], latest: Latest, bandwidth_counts: Mapping[Series, int]
) -> Iterator[bytes]:
    """Yield the text of all series, in Prometheus' format. bandwidth_counts: bytes since each
    control group exists, by series of bandwidth."""
    of_pod: dict[str, str] = {}
    of_container: dict[str, str] = {}
    for view in pods:
        pod = view.pod
        labels = _labels(node=node, pod_uid=pod.uid, pod_name=pod.name, pod_namespace=pod.namespace)
        of_pod[pod.uid] = labels
        for container in view.started:
            own = _labels(container_id=container.id, container_name=container.name)
            of_container[container.id] = f"{labels},{own}"
    of_node = _labels(node=node)
    yield from _pressure("container_psi", latest(Metric.CONTAINER_PSI), of_container)
    yield from _pressure("pod_psi", latest(Metric.POD_PSI), of_pod)
    yield from _pressure("node_psi", latest(Metric.NODE_PSI), {"": of_node})
    yield _cpi(latest(Metric.CONTAINER_CPI), of_container)
    yield _resctrl(of_node, latest(Metric.RESCTRL_LLC), bandwidth_counts)
    for metric, label, help_ in _OF_NODE:
        lines = [
            f"koordlet_{metric}{{{of_node},{_labels(**{label: of})}}} {value!r}\n"
            for (of, _), value in latest(metric).items()
        ]
        if lines:
            yield (_heading(metric, help_) + "".join(lines)).encode()


def _heading(name: str, help_: str) -> str:
    return f"# HELP koordlet_{name} {help_}\n# TYPE koordlet_{name} gauge\n"


def _labels(**labels: str) -> str:
    return ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items())


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def _pressure(
    name: str, values: Mapping[tuple[str, str], float], labels: Mapping[str, str]
) -> Iterator[bytes]:
    groups: dict[str, list[tuple[str, float]]] = {}
    for (of, detail), value in values.items():
        groups.setdefault(of, []).append((detail, value))
    known: dict[tuple[str, bool], str] = {}
    lines: list[str] = []
    if groups:
        lines.append(_heading(name, "Pressure in percent of the time: PSI of the kernel."))
    for index, (of, series) in enumerate(groups.items(), 1):
        own = labels.get(of)
        if own is None:
            continue  # it ended since the sample
        full = {detail.partition(".")[0] for detail, _ in series if ".full." in detail}
        for detail, value in series:
            resource, degree, measure = detail.split(".")
            if measure not in _AVERAGES:
                continue
            supported = resource in full
            rest = known.get((detail, supported))
            if rest is None:
                rest = known[detail, supported] = _labels(
                    psi_resource_type=resource,
                    psi_precision=measure,
                    psi_degree=degree,
                    cpu_full_supported="true" if supported else "false",
                )
            lines.append(f"koordlet_{name}{{{own},{rest}}} {value!r}\n")
        if not index % _GROUPS_OF_PAGE:
            yield "".join(lines).encode()
            lines = []
    yield "".join(lines).encode()


def _cpi(values: Mapping[tuple[str, str], float], labels: Mapping[str, str]) -> bytes:
    lines = [
        f'koordlet_container_cpi{{{own},cpi_field="{_CPI_FIELDS[detail]}"}} {value!r}\n'
        for (of, detail), value in values.items()
        if (own := labels.get(of)) is not None
    ]
    heading = _heading("container_cpi", "Events in a window: cycles and instructions.")
    return (heading + "".join(lines)).encode() if lines else b""


def _resctrl(
    node: str, occupancy: Mapping[tuple[str, str], float], counts: Mapping[Series, int]
) -> bytes:
    text = ""
    if occupancy:
        text += _heading("resctrl_llc_occupancy", "Bytes of the cache that the class occupies.")
    for (group, domain), value in occupancy.items():
        text += f"koordlet_resctrl_llc_occupancy{{{node},{_labels(cache_id=domain, qos=group)}}}"
        text += f" {value!r}\n"
    if counts:
        text += _heading(
            "resctrl_memory_bandwidth", "Bytes between cache and memory since the group exists."
        )
    for series, count in counts.items():
        domain, _, kind = series.detail.partition("/")
        own = _labels(cache_id=domain, qos=series.of, mb_type=kind)
        text += f"koordlet_resctrl_memory_bandwidth{{{node},{own}}} {count}\n"
    return text.encode()
