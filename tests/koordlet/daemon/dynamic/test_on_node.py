"""Pods as strategies see them: which ones the lists of kubelet and the API server lack."""

from __future__ import annotations

import pytest

from koordlet.daemon.dynamic.on_node import pod_on_node
from koordlet.state import NodeState, Source
from tests.koordlet.builders import LAYOUT, known, pod_manifest, runtime_pod, sandbox


@pytest.mark.parametrize("source", [Source.KUBELET, Source.KUBERNETES])
@pytest.mark.parametrize("listed", [True, False])
def test_a_pod_of_the_runtime_alone_is_unlisted_where_pods_are_listed(
    listed: bool, source: Source
) -> None:
    def unlisted() -> bool:
        (view,) = state.pod_views()
        return pod_on_node(view, listed=listed).unlisted

    state = NodeState(layout=LAYOUT)
    state.run_sandbox(sandbox(runtime_pod("u1"), "s1"))
    assert unlisted() == listed
    state.pods_list(source, [known(pod_manifest(uid="u1"))])
    assert not unlisted()
