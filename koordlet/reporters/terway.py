"""The two files that the terway-qos agent reads: bandwidths of the node, and its pods.

Rates in them are in bytes per second. Formats: docs/facts/koordlet.md, "Files for terway-qos".
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Final

import msgspec

from apis.annotations import PodNetworkQOS, parse_network_qos
from apis.errors import InputError, InputErrors
from apis.keys import ANNOTATION_NETWORK_QOS
from apis.qos import KubeQoS, QoSClass
from hooks.subject import Pod
from koordlet.qos.network.bandwidth import Bandwidths
from service.files import replacing

GLOBAL: Final = "global_bps_config"
PODS: Final = "pod.json"
MARKER: Final = ".koordlet"
"""An empty file beside them: koordlet wrote them, and removes them."""

_MODE: Final = 0o644
"""The agent may run as another user; the files hold no secrets."""
_BITS: Final = 8
_BY_LABEL: Final = {
    QoSClass.SYSTEM: 0,
    QoSClass.LSE: 1,
    QoSClass.LSR: 1,
    QoSClass.LS: 1,
    QoSClass.BE: 2,
}


def global_config(rates: Bandwidths) -> bytes:
    """Return the file of the node: a key and a rate in each line."""
    rows = {"hw_tx_bps_max": rates.total, "hw_rx_bps_max": rates.total}
    for level, of_class in (("l1", rates.ls), ("l2", rates.be)):
        for way, rate in (("tx", of_class.egress), ("rx", of_class.ingress)):
            rows[f"offline_{level}_{way}_bps_min"] = rate.request
            rows[f"offline_{level}_{way}_bps_max"] = rate.limit
    return "".join(f"{key} {bits // _BITS}\n" for key, bits in rows.items()).encode()


def pod_table(pods: Iterable[Pod], net_cls: str) -> tuple[bytes, list[InputError | InputErrors]]:
    """Return the file of the pods, by UID, and the errors of annotations.

    A pod with a bad annotation is in the file without limits. net_cls: the directory to which the
    pods' cgroups are relative.
    """
    table: dict[str, object] = {}
    errors: list[InputError | InputErrors] = []
    for pod in sorted(pods, key=lambda pod: pod.uid):
        limits = PodNetworkQOS()
        text = pod.annotations.get(ANNOTATION_NETWORK_QOS)
        if text is not None:
            try:
                limits = parse_network_qos(text, obj=pod.obj)
            except (InputError, InputErrors) as error:
                errors.append(error)
        table[pod.uid] = {
            "podName": pod.name,
            "podNamespace": pod.namespace,
            "podUID": pod.uid,
            "prio": _priority(pod),
            "cgroupDir": f"{net_cls}/{pod.cgroup}",
            "qosConfig": {
                "ingressBandwidth": (limits.ingress_limit_bits or 0) // _BITS,
                "egressBandwidth": (limits.egress_limit_bits or 0) // _BITS,
            },
        }
    return msgspec.json.encode(table), errors


def _priority(pod: Pod) -> int:
    """Return 0 for the system's pods, 1 for latency-sensitive ones, 2 for best-effort ones."""
    return _BY_LABEL.get(pod.qos, 2 if pod.kube_qos is KubeQoS.BESTEFFORT else 1)


class TerwayFiles:
    """Writes and removes the files. One thread at a time."""

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._written: dict[str, bytes] = {}

    def write(self, contents: Mapping[str, bytes]) -> None:
        """Replace the files whose content is another than the last one. Raises OSError."""
        os.makedirs(self._directory, mode=0o755, exist_ok=True)
        with open(f"{self._directory}/{MARKER}", "ab"):
            pass
        for name, content in contents.items():
            path = f"{self._directory}/{name}"
            if self._written.get(name) == content and os.path.exists(path):
                continue
            with replacing(path, mode=_MODE) as file:
                file.write(content)
            self._written[name] = content

    def remove(self) -> bool:
        """Remove the files if koordlet wrote them; return whether it did. Raises OSError."""
        self._written.clear()
        marker = f"{self._directory}/{MARKER}"
        if not os.path.lexists(marker):
            return False
        for name in (GLOBAL, PODS, MARKER):
            with suppress(FileNotFoundError):
                os.unlink(f"{self._directory}/{name}")
        return True
