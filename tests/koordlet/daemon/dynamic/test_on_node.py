"""Pods as strategies see them: which ones kubelet's list lacks."""

from __future__ import annotations

import pytest

from koordlet.daemon.dynamic.on_node import pod_on_node
from koordlet.state import NodeState, Source
from tests.koordlet.builders import LAYOUT, known, pod_manifest, runtime_pod, sandbox


@pytest.mark.parametrize("kubelet_lists", [True, False])
def test_a_pod_of_the_runtime_alone_is_unlisted_where_kubelet_lists_pods(
    kubelet_lists: bool,
) -> None:
    def unlisted() -> bool:
        (view,) = state.pod_views()
        return pod_on_node(view, kubelet_lists=kubelet_lists).unlisted

    state = NodeState(layout=LAYOUT)
    state.run_sandbox(sandbox(runtime_pod("u1"), "s1"))
    assert unlisted() == kubelet_lists
    state.pods_list(Source.KUBELET, [known(pod_manifest(uid="u1"))])
    assert not unlisted()
