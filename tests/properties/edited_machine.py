"""Random lives of a node whose pods are edited: only kubelet's list shows the edits.

Adds to `node_machine` a daemon that reads kubelet's pods, edits of labels and annotations while
containers run, and resizes that no event reports.
"""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule

from koordlet.state import Source
from koordlet.state.podspec import KnownPod
from tests.properties.listed import listed
from tests.properties.node_machine import NodeMachine

CLASSES = ("", "LS", "LSR", "SYSTEM", "BE")


class EditedMachine(NodeMachine):
    """The rules of `NodeMachine`, and rules that edit pods."""

    taken: list[KnownPod]

    @rule()
    def kubelet_lists_its_pods(self) -> None:
        self.node.state.pods_list(Source.KUBELET, [listed(pod) for pod in self.node.pods])

    @rule()
    def kubelet_is_asked(self) -> None:
        self.taken = [listed(pod) for pod in self.node.pods]

    @precondition(lambda self: hasattr(self, "taken"))
    @rule()
    def an_old_list_comes(self) -> None:
        """A pass works from it: pods that are gone by now, edits that are undone."""
        self.node.state.pods_list(Source.KUBELET, self.taken)
        self.node.reconcile()

    @precondition(lambda self: self.node.pods)
    @rule(
        number=st.integers(0, 9),
        qos=st.sampled_from(CLASSES),
        numa=st.booleans(),
        oom_score_adj=st.sampled_from([None, -500, 900]),
        cache_percent=st.sampled_from([0, 20]),
    )
    def a_pod_is_edited(
        self, number: int, qos: str, numa: bool, oom_score_adj: int | None, cache_percent: int
    ) -> None:
        pod = self._pod(number)
        kind = pod.kind
        if qos == "BE" and kind.kube_qos != "BestEffort":
            qos = kind.qos
        pod.first = pod.first or kind
        pod.kind = replace(
            kind, qos=qos, numa=numa, oom_score_adj=oom_score_adj, cache_percent=cache_percent
        )
        self.kubelet_lists_its_pods()

    @rule(number=st.integers(0, 9), half=st.booleans())
    def a_container_is_resized_unheard(self, number: int, half: bool) -> None:
        if self._resize(number, half=half, hooked=False):
            self.kubelet_lists_its_pods()
            self.node.synchronize()

    def _settled(self) -> None:
        self.kubelet_lists_its_pods()
        super()._settled()

    @invariant()
    def every_decision_gives_the_cpus_of_the_books(self) -> None:
        if hasattr(self, "node"):
            self.kubelet_lists_its_pods()
        super().every_decision_gives_the_cpus_of_the_books()
