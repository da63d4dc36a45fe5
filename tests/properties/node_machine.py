"""Random lives of a node. A failure shrinks to the few steps that show it, ready to be replayed.

Invariants of docs/architecture.md: only managed places are written; the kernel never has to refuse
what was planned; no write puts a child above its parent; whatever was lost, doubled, late, refused
or cut off, one full list and quiet passes bring the decided state; exclusive CPUs belong to one
pod; switching everything off leaves the node as if we had never been there.
"""

from __future__ import annotations

import errno

from hypothesis import note
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from apis.cpuset import CpuSet
from apis.qos import KubeQoS
from hooks.stage import Stage
from hooks.state import State
from hooks.subject import ContainerSubject, Level, SandboxSubject
from koordlet.executor.slots import ResourceView
from linux.cgroup_files import FILES, field_text, same
from linux.resources import Resource
from tests.properties.cpus import NONE, PLANS, CpuPlan
from tests.properties.daemon import ALL_GATES, BE_CPU_MANAGER, NO_GATES
from tests.properties.host_apps import APPS
from tests.properties.lives import GATES, LIVES, POD_KINDS, PROFILES, SLOS, TIMES, Life
from tests.properties.node import OperatedNode
from tests.properties.pods import GIB, Running, RunningContainer
from tests.properties.strategies import WANTED
from tests.properties.twin import differences
from tests.simulated import Crash, Profile
from tests.simulated.kernel import UNDER_TEST
from tests.simulated.kubelet import Limits


class NodeMachine(RuleBasedStateMachine):
    """The rules are what may happen; `invariant` and `teardown` are what holds."""

    node: OperatedNode

    @initialize(profile=st.sampled_from(sorted(PROFILES)), life=LIVES)
    def boot(self, profile: str, life: Life) -> None:
        self._boot(PROFILES[profile], life)

    def _boot(self, profile: Profile, life: Life) -> None:
        self.end = life.end
        self.unhooked = bool(life.older)
        self.behind = False
        self.number = 0
        self.ever_declared = set(life.declared)
        self.node = self._node_of(profile, PLANS[life.plan])
        for kind in life.older:
            self._start(kind)
        for name in sorted(life.apps):
            self.node.start_app(name)
        self.node.set_gates(ALL_GATES | GATES[life.gates])
        self.node.set_slo(SLOS[life.slo])
        self.node.declare(life.declared)
        self.node.publish_topology()
        self.node.synchronize()
        for kind in life.younger:
            self._start(kind)

    def _node_of(self, profile: Profile, plan: CpuPlan) -> OperatedNode:
        return OperatedNode(profile, plan)

    def _start(self, kind: str, *, times: int = 1, late: bool = False) -> None:
        pod = self.node.add_pod(POD_KINDS[kind], times=times, late=late)
        if pod is not None:
            self.node.start_container(pod, hooked=True)

    def _pod(self, number: int) -> Running:
        return self.node.pods[number % len(self.node.pods)]

    def _container(self, number: int) -> RunningContainer | None:
        all_of_them = [c for pod in self.node.pods for c in pod.containers]
        return all_of_them[number % len(all_of_them)] if all_of_them else None

    # What kubelet and the runtime do

    @rule(
        kind=st.sampled_from(sorted(POD_KINDS)),
        times=TIMES,
        late=st.booleans(),
        published=st.booleans(),
    )
    def a_pod_arrives(self, kind: str, times: int, late: bool, published: bool) -> None:
        self._start(kind, times=times, late=late)
        if published:
            self.node.publish_topology()

    @precondition(lambda self: self.node.pods)
    @rule(number=st.integers(0, 9), times=st.sampled_from([1, 2]))
    def a_container_starts(self, number: int, times: int) -> None:
        pod = self._pod(number)
        if len(pod.containers) < 2:
            made = self.node.start_container(pod, hooked=True, times=times)
            allowed = made or self.unhooked or self.behind
            assert allowed, "a creation that we answered was refused by the kernel"

    @precondition(lambda self: self.node.pods)
    @rule(number=st.integers(0, 9))
    def a_container_starts_unseen(self, number: int) -> None:
        pod = self._pod(number)
        if len(pod.containers) < 2:
            self.unhooked = True
            self.node.start_container(pod, hooked=False)

    @rule(number=st.integers(0, 9), times=TIMES, late=st.booleans())
    def a_container_stops(self, number: int, times: int, late: bool) -> None:
        container = self._container(number)
        if container is not None:
            self.node.stop_container(container, times=times, late=late)

    @precondition(lambda self: self.node.pods)
    @rule(number=st.integers(0, 9), times=TIMES, late=st.booleans(), published=st.booleans())
    def a_pod_goes(self, number: int, times: int, late: bool, published: bool) -> None:
        self.node.remove_pod(self._pod(number), times=times, late=late)
        if published:
            self.node.publish_topology()

    @rule(number=st.integers(0, 9), half=st.booleans())
    def a_container_is_resized(self, number: int, half: bool) -> None:
        """Also while the daemon is not connected: the runtime's next list shows it."""
        self._resize(number, half=half, hooked=True)

    def _resize(self, number: int, *, half: bool, hooked: bool) -> bool:
        """Tell whether there is a container that kubelet resizes."""
        container = self._container(number)
        if container is None or container.pod.kind.kube_qos != "Burstable":
            return False
        full = container.pod.kind.limits
        if not full.cpu_limit_milli:
            return False
        smaller = Limits(full.cpu_request_milli // 2, full.cpu_limit_milli // 2, GIB)
        self.node.resize(container, smaller if half else full, hooked=hooked)
        return True

    @precondition(lambda self: self.node.connected)
    @rule()
    def the_static_cpu_manager_looks(self) -> None:
        """It requests other CPUs for every container whose set has to change.

        Only while the daemon is connected: without the event, a set that equals a delivered one
        would not show as a request.
        """
        for pod in self.node.pods:
            for container in pod.containers:
                self.node.pin_again(container)

    @rule(number=st.integers(0, 9))
    def a_process_forks(self, number: int) -> None:
        container = self._container(number)
        if container is not None:
            self.node.fork(container)

    @rule()
    def systemd_reloads(self) -> None:
        """It writes again what each container was made with, also what was given back since."""
        self.node.daemon_reload()

    # What the operator does

    @rule(name=st.sampled_from(sorted(APPS)))
    def a_host_application_starts(self, name: str) -> None:
        self.node.start_app(name)

    @rule(name=st.sampled_from(sorted(APPS)))
    def a_host_application_ends(self, name: str) -> None:
        self.node.end_app(name)

    @rule(name=st.sampled_from(sorted(APPS)), nth=st.integers(1, 4))
    def a_host_application_ends_while_it_is_written(self, name: str, nth: int) -> None:
        self.node.kernel.faults.before("write", lambda: self.node.end_app(name), nth=nth)
        self.node.reconcile()
        self.node.kernel.faults.clear()

    @rule(name=st.sampled_from(["BE", "by-hand"]))
    def an_operator_makes_a_control_group(self, name: str) -> None:
        """Also one with a name of ours: its tasks are few CLOSIDs' worth, and not ours to end."""
        self.node.make_control_group(name)

    @rule(names=st.sets(st.sampled_from(sorted(APPS))))
    def host_applications_are_declared(self, names: set[str]) -> None:
        self.node.declare(names)
        self.ever_declared |= names

    @rule(cpu=st.integers(0, 15), seen=st.booleans())
    def a_cpu_goes_offline(self, cpu: int, seen: bool) -> None:
        self._hotplug(cpu, online=False, seen=seen)

    @rule(cpu=st.integers(0, 15), seen=st.booleans())
    def a_cpu_comes_back(self, cpu: int, seen: bool) -> None:
        self._hotplug(cpu, online=True, seen=seen)

    def _hotplug(self, cpu: int, *, online: bool, seen: bool) -> None:
        """Until the daemon has looked, a runtime may be told of a CPU that v1 does not give."""
        self.node.set_online(cpu % self.node.profile.topology.cpus, online=online)
        self.unhooked = True
        if seen:
            self.node.look_at_cpus()

    # What reaches the daemon

    @rule()
    def late_events_come(self) -> None:
        self.node.deliver_late()

    @rule()
    def the_runtime_lists_everything(self) -> None:
        self.node.synchronize()

    @rule()
    def the_connection_breaks(self) -> None:
        self.node.connected = False

    @rule(slo=st.sampled_from(sorted(SLOS)))
    def the_nodeslo_changes(self, slo: str) -> None:
        self.node.set_slo(SLOS[slo])

    @rule(ratio=st.sampled_from(["", "1.20", "1.50"]))
    def the_ratio_changes(self, ratio: str) -> None:
        self.node.set_ratio(ratio)

    @rule(gates=st.sampled_from(sorted(GATES)))
    def gates_change(self, gates: str) -> None:
        if GATES[gates].get(BE_CPU_MANAGER):
            self.node.end_leases()
        self.node.set_gates(ALL_GATES | GATES[gates])

    @rule()
    def the_topology_is_reported(self) -> None:
        self.node.publish_topology()

    # What strategies do

    @rule(wanted=st.sampled_from(sorted(WANTED)))
    def a_strategy_steps(self, wanted: str) -> None:
        """It claims something, something else, the same for another reason, or nothing more."""
        strategy, claims = WANTED[wanted]
        if "CPUs" in wanted and self.node.inputs.settings.feature_gates.get(BE_CPU_MANAGER):
            return  # the pools of best-effort pods are then not the strategy's to narrow
        self.number += 1
        self.node.stand(strategy, claims(self.node, self.number))

    @rule()
    def no_strategy_steps_any_more(self) -> None:
        self.node.end_leases()

    # What the daemon does, and what happens to it

    @rule()
    def a_pass_runs(self) -> None:
        self.node.reconcile()

    @rule()
    def time_passes(self) -> None:
        self.node.kernel.clock.advance(30)
        self.node.reconcile()

    @rule(for_long=st.booleans())
    def the_daemon_restarts(self, for_long: bool) -> None:
        self.node.restart(for_long=for_long)

    @rule(nth=st.integers(1, 8))
    def the_daemon_is_killed_while_it_writes(self, nth: int) -> None:
        self.behind = True
        self.node.kernel.faults.crash("write", nth=nth)
        try:
            self.node.reconcile()
            self.node.kernel.faults.clear()
        except Crash:
            self.node.restart()

    @rule(
        nth=st.integers(1, 4),
        error=st.sampled_from([errno.EINVAL, errno.EBUSY, errno.EIO, errno.ENODEV]),
    )
    def a_write_is_refused(self, nth: int, error: int) -> None:
        self.behind = True  # a directory may keep less than what its new containers are given
        self.node.kernel.faults.fail("write", error, nth=nth)
        self.node.reconcile()
        self.node.kernel.faults.clear()
        # What was planned to follow the refused write may be refused with it, this once.
        self.node.refusals.clear()

    @rule(number=st.integers(0, 9), nth=st.integers(1, 4))
    def a_container_vanishes_while_it_writes(self, number: int, nth: int) -> None:
        container = self._container(number)
        if container is None:
            return

        def vanish() -> None:
            if container in container.pod.containers:
                self.node.stop_container(container, times=0, late=False)

        self.node.kernel.faults.before("write", vanish, nth=nth)
        self.node.reconcile()
        self.node.kernel.faults.clear()

    @rule()
    def everything_settles(self) -> None:
        self._settled()

    # What holds

    @invariant()
    def only_managed_places_are_written(self) -> None:
        if not hasattr(self, "node"):
            return
        node = self.node
        managed = [f"/{APPS[name].cgroup(node.kubelet)}/" for name in self.ever_declared]
        managed.append(f"/{node.kubelet.root}/")
        for write in node.kernel.writes_of(UNDER_TEST):
            inside = any(place in write.path for place in managed)
            other = write.path.startswith(("/proc/", "/sys/fs/resctrl/"))
            assert inside or other, write
        node.kernel.writes.clear()

    @invariant()
    def every_decision_gives_the_cpus_of_the_books(self) -> None:
        """An exclusive set goes to its pod, and the rest of the pool to all other pods."""
        if not hasattr(self, "node"):
            return
        node = self.node
        pods = {pod.here.uid: pod for pod in node.pods}
        for subject in node.state.snapshot(node.engine).subjects:
            if isinstance(subject, ContainerSubject | SandboxSubject) and subject.pod.uid in pods:
                outcome = node.engine.decide(subject).outcomes.get((Resource.CPUSET_CPUS, ""))
                decided = None if outcome is None else outcome.value
                expected = node.expected_cpus(pods[subject.pod.uid], node.pools)
                assert decided == (None if expected is None else CpuSet(expected)), subject.key

    @invariant()
    def the_kernel_refuses_nothing_that_was_planned(self) -> None:
        if not hasattr(self, "node"):
            return
        gone = {errno.ENOENT, errno.ENODEV, errno.ESRCH}
        assert not [write for write in self.node.refusals if write.error not in gone]

    def _settled(self) -> None:
        node = self.node
        node.publish_topology()
        report = node.settle()
        starved = node.starved()
        assert not (report.written or report.restored), report
        assert report.failed == len(starved), report
        bad: list[str] = []
        absent = {f"hostapp/{name}" for name in node.declared - node.apps}
        for view in node.reconciler.explain_all():
            assert not view.decision.faults, view.decision.faults
            waits = view.subject.key in absent
            for each in view.resources:
                if each.resource is Resource.RESCTRL_SCHEMATA and each.key in starved:
                    continue
                if each.state is State.FAILED or (each.state is State.PENDING) is not waits:
                    bad.append(f"{view.subject.key} {each.resource}: {each.state} {each.detail}")
        assert not bad, bad
        self._explained_are_the_kernels_values()
        self._replies_and_repairs_agree()
        self._known_pods_are_those_that_run()
        self._control_groups_are_those_that_are_wanted()
        self._cpus_are_as_decided()

    def _explained_are_the_kernels_values(self) -> None:
        kernel, version = self.node.kernel, self.node.profile.cgroup

        def holds(view: ResourceView) -> bool:
            file = FILES[view.resource]
            found = field_text(file, version, kernel.text(view.path))
            return view.desired is not None and same(file, view.desired, found)

        wrong = [
            f"{view.subject.key} {each.resource}: {each.desired} not {each.observed}"
            for view in self.node.reconciler.explain_all()
            for each in view.resources
            if each.state is State.APPLIED and each.resource in FILES and not holds(each)
        ]
        assert not wrong, wrong

    def _replies_and_repairs_agree(self) -> None:
        node = self.node
        for view in node.reconciler.explain_all():
            reply = node.decider.decide(node.engine, view.subject, Stage.CREATE_CONTAINER)
            assert reply.outcomes == view.decision.outcomes, view.subject.key

    def _known_pods_are_those_that_run(self) -> None:
        keys = {view.subject.key for view in self.node.reconciler.explain_all()}
        running = {f"container/{c.here.id}" for pod in self.node.pods for c in pod.containers}
        assert {key for key in keys if key.startswith("container/")} == running

    def _control_groups_are_those_that_are_wanted(self) -> None:
        """None of ours is left behind, none of an operator's is taken, all tasks are in theirs."""
        node = self.node
        here, there = node.kernel.resctrl, node.twin.resctrl
        if here is None or there is None:
            return
        wanted = {
            view.key
            for _, view in node.reconciler.standing([Resource.RESCTRL_SCHEMATA])
            if view.state in (State.APPLIED, State.DEGRADED)
        }
        assert here.groups.keys() == there.groups.keys() | wanted
        memberships = node.reconciler.standing([Resource.RESCTRL_GROUP])
        of_container = {
            subject.cgroup: view.desired
            for subject, view in memberships
            if view.state in (State.APPLIED, State.DEGRADED)
        }
        # Whose own group the machine has no room for stays where it was until there is.
        waiting = {subject.cgroup for subject, view in memberships if view.state is State.BLOCKED}
        for hierarchy in node.kernel.hierarchies[:1]:
            for group in hierarchy.root.walk():
                for task in () if group.path in waiting else group.tasks.values():
                    assert task.closid == of_container.get(group.path, ""), (group.path, task)

    def _cpus_are_as_decided(self) -> None:
        """Exclusive sets never overlap, and the share pools are what they and the reserve leave.

        In the kernel's files, for containers and sandboxes; who gets nothing from us runs where
        kubelet has put it.
        """
        node, books = self.node, self.node.cpus
        if not node.inputs.settings.feature_gates["CPUSetAllocator"]:
            return
        pools = books.pools()
        exclusive = [pod.cpus for pod in node.pods if pod.cpus]
        assert sum(map(len, exclusive)) == len(NONE.union(*exclusive))
        free = books.all - books.reserved - books.system - books.offline
        pinned = NONE.union(*books.pinned.values())
        assert pools.together == free - pinned - NONE.union(*exclusive)
        standing = node.board.standing
        narrowed = any(
            claim.resource is Resource.CPUSET_CPUS
            for claims in (
                standing.by_subject.get("kubeqos/BestEffort", ()),
                # Under kubelet's static policy the directories are left alone.
                standing.by_class.get((Level.SANDBOX, KubeQoS.BESTEFFORT), ()),
            )
            for claim in claims
        )
        for pod in node.pods:
            assert pod.here.sandbox is not None and pod.twin.sandbox is not None
            if narrowed and pod.kind.kube_qos == "BestEffort":
                continue  # what the kernel holds is what is explained, see above
            expected = node.expected_cpus(pod, pools)
            groups = [(each.here.cgroup, each.twin.cgroup) for each in pod.containers]
            groups.append((pod.here.sandbox.cgroup, pod.twin.sandbox.cgroup))
            may = node.twin_cpus(pod.twin.cgroup)
            for here, twin in groups:
                found = node.kernel_cpus(here)
                wanted = ((expected or NONE) & may) or node.twin_cpus(twin)
                assert found == wanted, f"{pod.name} {here}: {found} not {wanted}"
        for app in (APPS[name] for name in node.apps):
            cgroup = app.cgroup(node.kubelet)
            if narrowed and cgroup.startswith(f"{node.kubelet.qos_dir('BestEffort')}/"):
                continue
            pooled = app.name in node.declared and app.qos == "LS"
            shared = pools.within(node.inputs.kernel.pods_cpus).together
            wanted = shared if pooled else node.twin_cpus(cgroup)
            assert node.kernel_cpus(cgroup) == wanted, app.name

    def teardown(self) -> None:
        if not hasattr(self, "node"):
            return
        try:
            if self.end == "uninstalled":
                self.node.reconcile()
                self.node.uninstall()
            else:
                self._settled()
                self.node.end_leases()
                self.node.set_gates(NO_GATES)
                self._settled()
            self._as_if_never_there()
        finally:
            self.node.close()

    def _as_if_never_there(self) -> None:
        found = self._differences()
        note(f"{len(found)} differences")
        assert not found, found

    def _differences(self) -> list[str]:
        return differences(self.node)
