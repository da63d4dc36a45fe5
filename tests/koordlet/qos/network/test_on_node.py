"""Which pods' packets are told apart by their addresses, and which by their cgroup."""

from __future__ import annotations

import errno

import msgspec
import pytest

from apis.effective_nodeslo import decode_nodeslo
from hooks.facts import NodeInputs, Settings
from hooks.subject import PodSubject
from koordlet.qos.network.classes import PodOnNetwork
from koordlet.qos.network.on_node import groups_on_node, is_on, on_network
from koordlet.state.merging import PodView
from linux.packet_classes import Group
from tests.hooks.making import a_pod


class _Layout:
    def __init__(self, version: int) -> None:
        self.version = version

    def hierarchy(self, controller: str) -> str:
        return f"/sys/fs/cgroup{controller}"


class _Host:
    def inode(self, path: str) -> int:
        if path != "/sys/fs/cgroup/kubepods/podx":
            raise OSError(errno.ENOENT, "No such file", path)
        return 77


def _view(name: str, cgroup: str, *, host: bool, addresses: tuple[str, ...] = ()) -> PodView:
    pod = msgspec.structs.replace(a_pod("LS", name=name), host_network=host, cgroup=cgroup)
    return PodView(pod, PodSubject(pod), (), (), (), addresses=addresses)


OWN = _view("own", "kubepods/podo", host=False, addresses=("10.0.0.7",))
HOST = _view("host", "kubepods/podx", host=True, addresses=("10.0.0.1",))
GONE = _view("gone", "kubepods/podg", host=True)
NEW = _view("new", "", host=True)
PODS = (OWN, HOST, GONE, NEW)
_NO_CGROUP = "it has the node's address, and its cgroup does not exist yet"


def test_pods_on_the_nodes_network_are_told_apart_by_their_cgroup_on_v2() -> None:
    groups = groups_on_node(_Host(), _Layout(2), PODS)  # type: ignore[arg-type]
    assert groups == {
        HOST.pod.uid: Group(2, 77),
        GONE.pod.uid: _NO_CGROUP,
        NEW.pod.uid: _NO_CGROUP,
    }
    assert on_network(PODS, groups) == (
        PodOnNetwork(OWN.pod, ("10.0.0.7",)),
        PodOnNetwork(HOST.pod, ("10.0.0.1",), Group(2, 77)),
        PodOnNetwork(GONE.pod, (), no_group=_NO_CGROUP),
        PodOnNetwork(NEW.pod, (), no_group=_NO_CGROUP),
    )


@pytest.mark.parametrize("layout", [None, _Layout(1)], ids=["no cgroup tree", "v1"])
def test_elsewhere_they_are_not_told_apart(layout: _Layout | None) -> None:
    groups = groups_on_node(_Host(), layout, PODS)  # type: ignore[arg-type]
    assert set(groups) == {HOST.pod.uid, GONE.pod.uid, NEW.pod.uid}
    assert all("on cgroup v1 nftables cannot tell" in str(why) for why in groups.values())


@pytest.mark.parametrize(
    ("gate", "policy", "on"),
    [
        (True, "tc", (True, "gate TCNetworkQoS")),
        (False, "tc", (False, "gate TCNetworkQoS off")),
        (None, "tc", (False, "gate TCNetworkQoS off")),
        (True, "terway-qos", (False, "netQOSPolicy is terway-qos")),
    ],
)
def test_gate_and_policy_ask_for_classes(
    gate: bool | None, policy: str, on: tuple[bool, str]
) -> None:
    spec = {"resourceQOSStrategy": {"policies": {"netQOSPolicy": policy}}}
    inputs = NodeInputs(
        slo=decode_nodeslo({"spec": spec}, obj="NodeSLO n1"),
        settings=Settings(feature_gates={} if gate is None else {"TCNetworkQoS": gate}),
    )
    assert is_on(inputs) == on
