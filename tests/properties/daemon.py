"""The product's parts on one simulated kernel, wired as the daemon wires them.

State, NRI handler, engine, executor, journal and reconciler, without threads and sockets: passes
run when a test says so, and what follows a reply follows it at once.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec

from apis.effective_nodeslo import decode_nodeslo
from apis.keys import ANNOTATION_CPU_NORMALIZATION_RATIO
from hooks.engine import Engine
from hooks.facts import NodeInputs, NodeMeta, Settings
from hooks.policies import BUILTIN
from hooks.standing import Standing
from hooks.state import State
from koordlet.decisions.decider import Decider
from koordlet.executor.executor import Executor
from koordlet.executor.journal import Journal, JournalError
from koordlet.executor.node_wide import make_host_directory
from koordlet.executor.table import Limits as WriteLimits
from koordlet.node.host_apps import host_app_subjects
from koordlet.node.probe import pods_cpus, probe_kernel
from koordlet.qos.board import Board, Lease
from koordlet.reconciler.reconciler import Reconciler
from koordlet.reconciler.reports import PassReport
from koordlet.state import NodeState
from koordlet.state.requests_log import RequestsLog, load_requests
from koordlet.state.snapshot import Snapshot
from koordlet.transports.nri_handler import NriHandler
from linux.discovery import discover
from linux.resources import Resource, Value
from service.events import Events
from tests.properties import host_apps
from tests.simulated import SimulatedKernel

BE_CPU_MANAGER = "BECPUManager"
NO_GATES = {policy.gate: False for policy in BUILTIN}
ALL_GATES = {policy.gate: True for policy in BUILTIN}


class Daemon:
    """See the module. It owns a folder for journal and requests log: `close` it.

    kernel: with the pods' root in place.
    """

    strategies: tuple[str, ...] = ("suppress", "burst", "memory")
    """Whose claims there may be."""

    def __init__(self, kernel: SimulatedKernel) -> None:
        self.kernel = kernel
        self.folder = Path(tempfile.mkdtemp(prefix="koord-properties-"))
        self.layout = discover(kernel)
        self.probed = probe_kernel(kernel, self.layout)
        kernel.writes.clear()
        self.inputs = NodeInputs(
            node=NodeMeta(name="n1", allocatable_memory_bytes=kernel.memory_bytes),
            kernel=self.probed.facts,
            settings=Settings(feature_gates=ALL_GATES),
        )
        self.engine = Engine.build(BUILTIN, self.inputs)
        self._spec: dict[str, Any] = {}
        self.declared: frozenset[str] = frozenset()
        self._leases: Mapping[str, Lease] = {}
        self._start()

    def close(self) -> None:
        self.journal.close()
        self.reconciler.close()
        shutil.rmtree(self.folder)

    # Its lives

    def _start(self) -> None:
        """What the daemon makes at its start."""
        path = str(self.folder / "requests.log")
        self.state = NodeState(
            remembered=load_requests(path), layout=self.layout, awaited=["runtime"]
        )
        self.requests = RequestsLog(path, self.state.all_remembered)
        self.events = Events()
        self._work: list[Callable[[], None]] = []
        self._ended: list[str] = []
        self._pods: set[str] = set()
        self._pods_now = False
        self.decider = Decider(self.events)
        self.board = Board(self.strategies, self._stands)
        self.handler = NriHandler(
            state=self.state,
            decider=self.decider,
            events=self.events,
            requests=self.requests,
            surroundings=self,
        )
        self.journal = self._journal()
        self.executor = self._executor(burst_above_quota=self.probed.burst_above_quota)
        self.reconciler = Reconciler(
            self.executor, self.journal, self._snapshot, followed=self.decider.followed
        )
        self.connected = False
        self._place_host_apps()
        self.board.resume(self._leases)

    def restart(
        self, *, torn: Mapping[str, bytes] = MappingProxyType({}), for_long: bool = False
    ) -> None:
        """The daemon ends without a word and starts again; nothing is connected yet.

        for_long: longer than the strategies' claims live; else they are in force from the start.
        torn: the file's name -> what its last write left of a line that did not get through.
        What the runtime was handed reaches the journal with the pass that follows each reply at
        once; a kill within these milliseconds is left out.
        """
        self.kernel.restart_program()
        self._leases = {} if for_long else self.board.leases
        self._stop()
        for name, left in torn.items():
            with (self.folder / name).open("ab") as file:
                file.write(left)
        self._start()

    def _stop(self) -> None:
        self.journal.update()
        self.requests.close()
        self.journal.close()
        self.reconciler.close()

    def _journal(self) -> Journal:
        return Journal(
            str(self.folder / "journal"), boot="b1", monotonic=lambda: self.kernel.clock.now
        )

    def _executor(self, *, burst_above_quota: bool = False) -> Executor:
        return Executor(
            self.kernel,
            self.layout,
            self.journal,
            limits=WriteLimits(),
            burst_above_quota=burst_above_quota,
            clock=lambda: self.kernel.clock.now,
            wall_clock=lambda: self.kernel.clock.now,
        )

    def _snapshot(self) -> Snapshot:
        self._pods = set()
        self._pods_now = False
        self.reconciler.snapshot_made()
        return self.state.snapshot(self.engine)

    # `koordlet.transports.nri_handler.Surroundings`

    def after_reply(self, work: Callable[[], None]) -> None:
        self._work.append(work)

    later = after_reply

    def state_changed(self, reason: str) -> None:
        """The tests run passes by hand."""

    def pod_changed(self, uid: str, *, can_wait: bool = False) -> None:
        self._pods.add(uid)
        self._pods_now = self._pods_now or not can_wait

    def pod_appeared(self, uid: str) -> None:
        self.pod_changed(uid)

    container_complete = pod_appeared

    def delivered(
        self,
        container_id: str,
        resource: Resource,
        requested: Value | None,
        value: Value,
        policy: str,
    ) -> None:
        self.journal.note_delivered(container_id, resource, requested, value, policy=policy)

    def requested(self, cgroup: str) -> None:
        self.reconciler.requested(cgroup, self.state.requests)

    def superseded(self, container_id: str, resources: Collection[Resource]) -> None:
        self.journal.supersede(container_id, resources)

    def make_host_directory(self, path: str, mode: int) -> None:
        make_host_directory(self.kernel, path, mode)

    def ended(self, container_id: str) -> None:
        self._ended.append(container_id)

    def resctrl_groups(self) -> Collection[str]:
        return () if self.kernel.resctrl is None else [g for g in self.kernel.resctrl.groups if g]

    def drain(self) -> None:
        """Do what follows a reply: what was put off, and a look at the pods that changed."""
        self.handler.reply_written()
        work, self._work = self._work, []
        for each in work:
            each()
        if self._pods_now:
            pods = {uid: self.state.subjects_of(uid) for uid in self._pods}
            self._pods = set()
            self._pods_now = False
            self.reconciler.pods_changed(
                self.engine, pods, self.state.qos_subjects(), requests=self.state.requests
            )
            self.reconciler.update_once()

    # What strategies say

    def stand(self, strategy: str, standing: Standing) -> None:
        """A strategy claims this from now on. What the claims change is written at once."""
        self.board.publish(strategy, standing, until=float("inf"))
        self._follow()

    def end_leases(self) -> None:
        """No strategy has renewed its claims."""
        for strategy in self.strategies:
            self.board.drop(strategy)
        self._follow()

    def _stands(self, standing: Standing) -> None:
        self.decider.stand(standing)
        self.reconciler.standing_changed(standing)

    def _follow(self) -> None:
        """The reconciler's thread looks at the new claims, after a new engine with a pass."""
        if self.reconciler.update_once() is None:
            self.reconcile()

    # What objects and settings say

    def change(self, **inputs: Any) -> None:
        """Change node inputs and build the engine anew."""
        self.inputs = msgspec.structs.replace(self.inputs, **inputs)
        self.engine = Engine.build(BUILTIN, self.inputs, previous=self.engine)

    def set_slo(self, spec: Mapping[str, Any]) -> None:
        self._spec = dict(spec)
        self._tell_slo()

    def declare(self, names: Collection[str]) -> None:
        """The NodeSLO declares these host applications from now on."""
        self.declared = frozenset(names)
        self._tell_slo()

    def _tell_slo(self) -> None:
        spec = self._spec | {"hostApplications": host_apps.declarations(self.declared)}
        self.change(slo=decode_nodeslo(spec, obj="NodeSLO n1"))
        self._place_host_apps()

    def _place_host_apps(self) -> None:
        subjects, errors = host_app_subjects(self.inputs.slo.host_applications, self.layout)
        assert not errors
        self.state.set_host_apps(subjects)

    def set_ratio(self, ratio: str) -> None:
        """The node's CPU normalization ratio; "" takes the annotation away."""
        annotations = {ANNOTATION_CPU_NORMALIZATION_RATIO: ratio} if ratio else {}
        self.change(node=msgspec.structs.replace(self.inputs.node, annotations=annotations))

    def set_gates(self, gates: Mapping[str, bool]) -> None:
        self.change(settings=Settings(feature_gates=gates))

    def look_at_cpus(self) -> None:
        """Find out which CPUs pods can have now."""
        cpus = pods_cpus(self.kernel, self.layout)
        self.change(kernel=msgspec.structs.replace(self.inputs.kernel, pods_cpus=cpus))

    # Passes

    def uninstall(self) -> None:
        """`koordlet restore`: a process that knows nothing but the journal gives all back."""
        self.kernel.faults.clear()
        self.kernel.restart_program()
        self._stop()
        nothing = Snapshot(engine=Engine(NodeInputs(), (), 0), subjects=())
        self.journal = self._journal()
        self.reconciler = Reconciler(self._executor(), self.journal, lambda: nothing)
        report = self.reconciler.restore_all()
        assert not report.failed, report
        assert not self.journal.records()

    def reconcile(self) -> PassReport:
        ended, self._ended = self._ended, []
        report = self.reconciler.run_once("test")
        with suppress(JournalError):
            for container_id in ended:
                self.journal.forget_deliveries(container_id)
        return report

    def starved(self) -> list[str]:
        """The control groups that are wanted and for which the machine has no CLOSID left.

        Asserts that there is none left indeed, and that whoever should be in one is told so.
        """
        starved = [
            view.key
            for _, view in self.reconciler.standing([Resource.RESCTRL_SCHEMATA])
            if view.state is State.FAILED and "CLOSID" in view.detail
        ]
        if starved:
            assert self.kernel.resctrl is not None
            assert len(self.kernel.resctrl.groups) == self.kernel.resctrl.closids
            for _, view in self.reconciler.standing([Resource.RESCTRL_GROUP]):
                assert (view.state is State.BLOCKED) is (view.desired in starved), view
        return starved
