"""Random lives of a node that others disturb: who else writes there, and what fails besides writes.

Adds to `node_machine` an operator and kubelet as writers beside the runtime, reads that fail, slow
writes, a run directory that is full, journals with a torn end, both cgroup drivers on both cgroup
versions. Settled means more here: deciding again gives the same, a second pass writes nothing, a
restarted daemon finds nothing to do and knows the same, and every value that differs from an
undisturbed node's is explained by a claim.
"""

from __future__ import annotations

import errno
from contextlib import suppress
from dataclasses import replace

from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

from apis.cpuset import CpuSet
from hooks.state import State
from hooks.subject import Subject
from tests.koordlet.executor.bed import fill_disk
from tests.properties.lives import LIVES, PROFILES, Life
from tests.properties.node_machine import NodeMachine
from tests.properties.pods import RunningContainer
from tests.simulated import DEBIAN_12_V1, DEBIAN_12_V2
from tests.simulated.profiles import Driver, WeightFormula

DISTURBED = PROFILES | {
    profile.name: profile
    for profile in (
        replace(DEBIAN_12_V1, name="v1-systemd", driver=Driver.SYSTEMD),
        replace(
            DEBIAN_12_V2,
            name="v2-cgroupfs",
            driver=Driver.CGROUPFS,
            weights=WeightFormula.QUADRATIC,
        ),
    )
}
_BOTH = {
    "weight": ("cpu.shares", "cpu.weight"),
    "quota": ("cpu.cfs_quota_us", "cpu.max"),
    "memory limit": ("memory.limit_in_bytes", "memory.max"),
}
_IN_CONTAINER = _BOTH | {"cpus": ("cpuset.cpus", "cpuset.cpus")}
PAGE = 4096


class DisturbedMachine(NodeMachine):
    """The rules of `NodeMachine`, and those of everybody else on the node."""

    @initialize(profile=st.sampled_from(sorted(DISTURBED)), life=LIVES)
    def boot(self, profile: str, life: Life) -> None:
        self._boot(DISTURBED[profile], life)
        self.foreign = 0

    # Other writers

    @rule(number=st.integers(0, 9), what=st.sampled_from(sorted(_BOTH)))
    def somebody_else_writes(self, number: int, what: str) -> None:
        """To a pod, whose files are kubelet's and the operator's: their last value comes back."""
        container = self._container(number)
        if container is None:
            return
        self.foreign += 1
        version = self.node.profile.cgroup
        file = _BOTH[what][version - 1]
        # Never a value that we would write ourselves: then nobody could tell who did.
        text = {
            "weight": str(7 + self.foreign),
            "quota": str(31_007 + self.foreign),
            "memory limit": str((300_000 + self.foreign) * PAGE),
        }[what]
        if what == "quota" and version == 2:
            text += " 100000"
        here, twin = container.pod.here.cgroup, container.pod.twin.cgroup
        self._write_on_both(here, twin, file, text)

    def _write_on_both(self, here: str, twin: str, file: str, text: str) -> None:
        """Only a write that both kernels take has happened; the watch wakes a pass at once.

        A value that the runtime overwrote before any pass saw it cannot be restored.
        """
        node = self.node
        before = node.text(here, file)
        try:
            node.kernel.write_as("operator", node.kubelet.path(here, file), text)
        except OSError:
            return
        try:
            node.twin.write_as("operator", node.twin_kubelet.path(twin, file), text)
        except OSError:
            node.kernel.write_as("operator", node.kubelet.path(here, file), before)
            return
        node.reconcile()

    @rule(number=st.integers(0, 9), what=st.sampled_from(sorted(_IN_CONTAINER)))
    def somebody_else_writes_into_a_container(self, number: int, what: str) -> None:
        """Over a value of ours, and not on the twin: what comes back is what kubelet requested.

        Over one that is still claimed: where a claim has just ended, the newer value stays.
        """
        container = self._container(number)
        if container is None:
            return
        node = self.node
        subject = node.state.container(container.here.id)
        if subject is None:
            return
        standing = node.board.standing.of(subject)
        claimed = {
            resource for resource, _ in node.engine.decide(subject, standing=standing).outcomes
        }
        self.foreign += 1
        file = _IN_CONTAINER[what][node.profile.cgroup - 1]
        path = node.kubelet.path(container.here.cgroup, file)
        ours = {
            view.path
            for view in node.executor.views(f"container/{container.here.id}")
            if view.state in (State.APPLIED, State.DEGRADED) and view.resource in claimed
        }
        if path not in ours:
            return
        text = {
            "weight": str(7 + self.foreign),
            "quota": f"{31_007 + self.foreign}" + " 100000" * (node.profile.cgroup - 1),
            "memory limit": str((300_000 + self.foreign) * PAGE),
            "cpus": str(CpuSet(range(node.profile.topology.cpus))),
        }[what]
        node.kernel.clock.advance(100)  # else it is a fight, and the value is left to the operator
        with suppress(OSError):
            node.kernel.write_as("operator", path, text)
        node.reconcile()

    # What fails

    @rule(
        nth=st.integers(1, 20),
        error=st.sampled_from([errno.EIO, errno.EACCES, errno.ENODEV, errno.EMFILE]),
    )
    def a_read_fails(self, nth: int, error: int) -> None:
        self.node.kernel.faults.fail("read", error, nth=nth)
        self.node.reconcile()
        self.node.kernel.faults.clear()

    @rule()
    def writes_are_slow(self) -> None:
        self.node.kernel.faults.before("write", lambda: self.node.kernel.clock.advance(3), nth=0)
        self.node.reconcile()
        self.node.kernel.faults.clear()

    @rule()
    def the_run_directory_is_full(self) -> None:
        """One append fails; the daemon must write nothing that it could not undo."""
        journal = self.node.journal
        fill_disk(journal)
        self.node.reconcile()
        journal.close()  # there is room again before anything else happens
        journal.update()

    @rule(bytes_=st.integers(1, 40))
    def the_daemon_restarts_after_a_torn_write(self, bytes_: int) -> None:
        """Half a record more than was written: the one that did not get through."""
        record = b'{"record":{"place":"kubepods/burstable/x","inode":1}}'
        request = b'{"id":"0000000000000000","shares":1024,"quota_us"'
        self.node.restart(torn={"journal": record[:bytes_], "requests.log": request[:bytes_]})

    # What settled means

    def _settled(self) -> None:
        super()._settled()
        node = self.node
        decided = {view.subject.key: view for view in node.reconciler.explain_all()}
        for view in decided.values():
            standing = node.board.standing.of(view.subject)
            again = node.engine.decide(view.subject, standing=standing)
            assert again.outcomes == view.decision.outcomes, view.subject.key
        assert node.reconcile().written == 0
        self._differences_are_explained()
        before = {key: view.subject for key, view in decided.items()}
        node.restart()
        node.synchronize()
        report = node.reconcile()
        assert not report.written and report.failed == len(node.starved()), (
            "a daemon that starts anew finds something to do",
            [write for write in node.kernel.writes if write.writer == "daemon"],
        )
        after = {view.subject.key: view.subject for view in node.reconciler.explain_all()}
        assert _known(after) == _known(before)

    def _differences_are_explained(self) -> None:
        """What differs from the node that never had us is claimed, or a claim needs it so."""
        node = self.node
        claimed: set[str] = set()
        for view in node.reconciler.explain_all():
            for each in view.resources:
                if each.claim is not None and each.state in (State.APPLIED, State.DEGRADED):
                    claimed.add(each.path)
        supported = {record.place for record in node.journal.records() if record.support_of}
        for pod in node.pods:
            for container in pod.containers:
                self._explained(container, claimed, supported)

    def _explained(
        self, container: RunningContainer, claimed: set[str], supported: set[str]
    ) -> None:
        node = self.node
        for names in _BOTH.values():
            file = names[node.profile.cgroup - 1]
            twin = node.twin.text(node.twin_kubelet.path(container.twin.cgroup, file))
            path = node.kubelet.path(container.here.cgroup, file)
            if node.kernel.text(path) != twin:
                explained = path in claimed or container.here.cgroup in supported
                assert explained, f"{path}: {node.kernel.text(path)!r} not {twin!r}"


def _known(subjects: dict[str, Subject]) -> set[tuple[str, str]]:
    return {(key, subject.cgroup) for key, subject in subjects.items()}
