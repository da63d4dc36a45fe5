"""What network QoS needs to know of the node: whether it is on, the device, and the pods.

The daemon and `koordctl plan` both look here, so that a plan is about what the daemon would do.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import Final

from apis.nodeslo import NetQOSPolicy
from hooks.facts import NodeInputs
from koordlet.qos.network.classes import PodOnNetwork
from koordlet.state.merging import PodView
from linux.cgroup_paths import Layout
from linux.host import Host
from linux.network_devices import NetworkDevice, default_device, network_device
from linux.packet_classes import Group

GATE: Final = "TCNetworkQoS"
DEFAULT_ROUTE: Final = "the default route"

_ON_V1: Final = (
    "it has the node's address, and on cgroup v1 nftables cannot tell the cgroup of a socket"
)
_NO_CGROUP: Final = "it has the node's address, and its cgroup does not exist yet"


def is_on(inputs: NodeInputs) -> tuple[bool, str]:
    """Return whether gate and NodeSLO ask for traffic classes, and which of them decides."""
    gate = inputs.settings.gate(GATE, default=False)
    policy = inputs.slo.resource_qos_strategy.policies.net_qos_policy
    if not gate:
        return False, f"gate {GATE} off"
    if policy is not NetQOSPolicy.TC:
        return False, f"netQOSPolicy is {policy}"
    return True, f"gate {GATE}"


def shaped_device(host: Host, configured: str) -> NetworkDevice:
    """Return the device to shape: `configured`, or that of the default route if it is "".

    Raises OSError, and ValueError with what is to be done.
    """
    try:
        outside = host.inode("/proc/1/ns/net") != host.inode("/proc/self/ns/net")
    except OSError:
        outside = False  # it cannot be looked at; the device's number decides
    if outside:
        raise ValueError("koordlet is not in the node's network namespace: hostNetwork")
    name = configured or default_device(host)
    if not name:
        raise ValueError("there is no default route: set networkQos.device")
    try:
        return network_device(host, name)
    except FileNotFoundError:
        raise ValueError(f"there is no network device {name}") from None


def groups_on_node(
    host: Host, layout: Layout | None, pods: Collection[PodView]
) -> dict[str, Group | str]:
    """Return UID -> cgroup of each pod on the node's network, or why it has none that counts.

    A cgroup that is made again has another inode, so this looks each time.
    """
    found: dict[str, Group | str] = {}
    for view in pods:
        pod = view.pod
        if not pod.host_network:
            continue
        if layout is None or layout.version != 2:
            found[pod.uid] = _ON_V1
            continue
        found[pod.uid] = _NO_CGROUP
        if pod.cgroup:
            with suppress(OSError):  # not made yet, or gone
                inode = host.inode(f"{layout.hierarchy('')}/{pod.cgroup}")
                found[pod.uid] = Group(pod.cgroup.count("/") + 1, inode)
    return found


def on_network(
    pods: Collection[PodView], groups: Mapping[str, Group | str]
) -> tuple[PodOnNetwork, ...]:
    """Return the pods with what distinguishes their packets. groups: of `groups_on_node`."""
    made = []
    for view in pods:
        group = groups.get(view.pod.uid, "")
        if isinstance(group, str):
            made.append(PodOnNetwork(view.pod, view.addresses, no_group=group))
        else:
            made.append(PodOnNetwork(view.pod, view.addresses, group))
    return tuple(made)
