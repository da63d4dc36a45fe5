"""Plans: the writes that other objects would lead to. Nothing is written.

The running daemon plans on a copy of its state. Without a daemon a plan reads this machine, the
runtime's CRI and the objects. Engine and executor are the same, so a plan is what a pass would do.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from apis.effective_nodeslo import default_nodeslo
from hooks.engine import Decide, Engine, decide
from hooks.facts import KernelFacts, NodeInputs, NodeMeta
from hooks.policies import BUILTIN
from hooks.policy import Policy
from hooks.standing import Standing, merged
from hooks.subject import PodSubject
from koordlet.configuration.config import Config
from koordlet.decisions.decider import name_of
from koordlet.decisions.rules import policy_state
from koordlet.executor.executor import Executor
from koordlet.executor.journal import FILE_NAME, Journal
from koordlet.executor.network import FILE_NAME as NETWORK_FILE
from koordlet.executor.network import Network
from koordlet.executor.slots import PlannedWrite
from koordlet.node.disks import read_pod_volumes, with_volume_settings
from koordlet.node.host_apps import host_app_subjects
from koordlet.node.probe import probe_kernel
from koordlet.planning.explain import Plain
from koordlet.planning.network_plan import Shaped, plan_network
from koordlet.qos.lease_file import FILE_NAME as LEASES
from koordlet.qos.lease_file import LeaseFileError, load
from koordlet.qos.network.on_node import is_on
from koordlet.qos.network.status import NAME as NETWORK_QOS
from koordlet.qos.runner import gates_off
from koordlet.qos.strategies.registry import STRATEGIES
from koordlet.reconciler.wishes import plan_for
from koordlet.sources.objects import NodeObjects
from koordlet.state import NodeState, Source
from koordlet.state.podspec import known_pod
from koordlet.state.requests_log import load_requests
from linux.cgroup_paths import Layout
from linux.host import Host

NO_CLAIMS: Final[Mapping[str, Standing]] = {}


def inputs_of(
    objects: NodeObjects, *, node_name: str, kernel_facts: KernelFacts, config: Config
) -> NodeInputs:
    """Return the engine's inputs under `objects`."""
    return NodeInputs(
        slo=objects.slo if objects.slo is not None else default_nodeslo(),
        topology=objects.topology,
        node=objects.node if objects.node is not None else NodeMeta(name=node_name),
        kernel=kernel_facts,
        settings=config.settings(),
    )


def plan(
    *,
    host: Host,
    layout: Layout,
    journal: Journal,
    state: NodeState,
    objects: NodeObjects,
    inputs: NodeInputs,
    site: Sequence[Policy] = (),
    decide: Decide = decide,
    before: Engine | None = None,
    claims: Mapping[str, Standing] = NO_CLAIMS,
    shaped: Shaped | None = None,
) -> Plain:
    """Return what a pass under `objects` would write. `state` and `journal` must be copies.

    `pods` of the answer is the number of pods that are planned for.

    site: the site's policies. decide: decides about one subject. before: the engine in force, for
    what changes in the policies. claims: the strategies' claims, which stay as they are, without
    those of strategies that `inputs` disable. shaped: for traffic classes; None leaves them out.
    """
    disabled = {each.name: why for each in STRATEGIES if (why := each.disabled(inputs))}
    standing = merged([of for name, of in claims.items() if name not in disabled])
    engine = Engine.build((*BUILTIN, *site), inputs)
    apps, errors = host_app_subjects(inputs.slo.host_applications, layout)
    state.pods_list(Source.OBJECTS, [known_pod(pod) for pod in objects.pods])
    state.set_host_apps(apps)
    executor = Executor(host, layout, journal, page_size_bytes=inputs.kernel.page_size_bytes)
    snapshot = state.snapshot(engine)
    names = {subject.key: name_of(subject) for subject in snapshot.subjects}
    places = {subject.cgroup: name_of(subject) for subject in snapshot.subjects if subject.cgroup}
    network, unplanned = (
        plan_network(shaped, inputs, host=host, layout=layout, pods=state.pod_views())
        if shaped is not None
        else ([], [])
    )
    return {
        "writes": [
            *(
                _planned(each, names.get(each.subject) or places.get(each.slot[0], ""))
                for each in plan_for(executor, snapshot, decide, standing)
            ),
            *network,
        ],
        "pods": sum(isinstance(subject, PodSubject) for subject in snapshot.subjects),
        "policies": [
            *_policy_changes(before, engine),
            *_network_change(before, engine),
            *(
                {"policy": name, "before": "on", "after": "off", "why": disabled[name]}
                for name in claims
                if name in disabled
            ),
        ],
        "problems": [
            *({"file": p.file, "object": p.obj, "message": p.message} for p in objects.problems),
            *_without_slo(objects, inputs.node.name),
            *({"file": "", "object": error.obj, "message": str(error)} for error in errors),
            *(
                {"file": "", "object": f"policy {each.policy.name}", "message": each.problem}
                for each in engine.states
                if each.problem
            ),
            *unplanned,
        ],
    }


def _without_slo(objects: NodeObjects, node_name: str) -> list[Plain]:
    """Return a note if no NodeSLO has this node's name: such objects are of another node."""
    if objects.slo is not None:
        return []
    message = "there is none of this name: its defaults hold, and they claim almost nothing"
    return [{"file": "", "object": f"NodeSLO {node_name}", "message": message}]


def _planned(write: PlannedWrite, name: str) -> Plain:
    return {
        "act": write.act.value,
        "path": write.path,
        "subject": write.subject,
        "name": name,
        "resource": write.slot[1].value,
        "old": write.old,
        "new": write.new,
        "why": write.why,
        "final": write.final,
    }


def _policy_changes(before: Engine | None, after: Engine) -> list[Plain]:
    old = {} if before is None else {s.policy.name: policy_state(s) for s in before.states}
    changes = []
    for each in after.states:
        name, (state, why) = each.policy.name, policy_state(each)
        was = old.get(name, ("", ""))[0]
        if was != state:
            changes.append({"policy": name, "before": was, "after": state, "why": why})
    return changes


def _network_change(before: Engine | None, after: Engine) -> list[Plain]:
    """Return that network QoS goes on or off, if it does."""
    states = {True: "on", False: "off"}
    on, why = is_on(after.inputs)
    was = "" if before is None else states[is_on(before.inputs)[0]]
    if states[on] == was:
        return []
    return [{"policy": NETWORK_QOS, "before": was, "after": states[on], "why": why}]


class ReadOnlyHost:
    """A `Host` that refuses every change, so that probing falls back to evidence."""

    def __init__(self, host: Host) -> None:
        self._host = host

    def __getattr__(self, name: str) -> Any:
        return getattr(self._host, name)

    def write(self, path: str, data: bytes) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), path)

    def mkdir(self, path: str, mode: int = 0o755) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), path)

    def rmdir(self, path: str) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), path)

    def core_sched_create(self, pid: int) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    def core_sched_copy(self, source_pid: int, target_pids: list[int]) -> list[int]:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))


def _with_volumes(
    host: Host, facts: KernelFacts, state: NodeState, config: Config
) -> tuple[KernelFacts, list[Plain]]:
    """Return the facts with the disks of the volumes that pods name; or a note why without."""
    uids = with_volume_settings(view.pod for view in state.pod_views())
    try:
        volumes = read_pod_volumes(host, uids, kubelet_directory=config.kubelet.directory)
    except OSError as error:
        return facts, [{"file": "", "object": "volumes", "message": f"cannot be read: {error}"}]
    return msgspec.structs.replace(facts, pod_volumes=volumes), []


def _kept_claims(path: str, inputs: NodeInputs, *, boot: str) -> Mapping[str, Standing]:
    """Return the claims of strategies that a daemon would resume if it started now.

    Raises LeaseFileError and OSError.
    """
    ttl_s = {each.name: each.ttl_s for each in STRATEGIES if not gates_off(each, inputs.settings)}
    carried, _ = load(path, boot=boot, ttl_s=ttl_s, now=time.monotonic())
    return {name: lease.standing for name, lease in carried.leases.items()}


def plan_offline(
    config: Config, objects: NodeObjects, *, host: Host, layout: Layout, boot: str
) -> Plain:
    """Return a plan without a daemon: containers come from CRI where its socket answers.

    `pods` is None where neither CRI answered nor `objects` hold a pod of this node: whether there
    are pods is not known then, and the plan lacks their values.
    """
    # A protocol class cannot follow delegation by __getattr__.
    looking: Any = ReadOnlyHost(host)
    facts = probe_kernel(looking, layout).facts
    # Until the runtime has listed its containers, none counts as gone and nothing is restored.
    remembered = load_requests(f"{config.run_dir}/requests.log")
    state = NodeState(layout=layout, awaited=["runtime"], remembered=remembered)
    notes = []
    listed = False
    if os.path.exists(config.cri.socket):
        from koordlet.sources.cri import CriClient
        from koordlet.sources.polling import SourceError

        def unreadable(obj: str, problem: str) -> None:
            notes.append({"file": "", "object": obj, "message": problem})

        client = CriClient(config.cri, unreadable)
        try:
            state.runtime_list(*client.fetch())
            state.mark_synced("runtime")
            listed = True
        except SourceError as error:
            notes.append({"file": "", "object": "CRI", "message": str(error)})
        finally:
            client.close()
    else:
        notes.append(
            {
                "file": "",
                "object": "CRI",
                "message": f"no socket at {config.cri.socket}: only pods of the objects are known",
            }
        )
    path = f"{config.run_dir}/{FILE_NAME}"
    journal = Journal.read(path, boot=boot) if os.path.exists(path) else Journal()
    if journal.lost:
        notes.append({"file": path, "object": "journal", "message": journal.lost})
    state.pods_list(Source.OBJECTS, [known_pod(pod) for pod in objects.pods])
    facts, note = _with_volumes(looking, facts, state, config)
    notes += note
    inputs = inputs_of(objects, node_name=config.node_name, kernel_facts=facts, config=config)
    path = f"{config.run_dir}/{LEASES}"
    try:
        claims = _kept_claims(path, inputs, boot=boot)
    except (LeaseFileError, OSError) as error:
        claims = NO_CLAIMS
        notes.append({"file": path, "object": "strategies' claims", "message": str(error)})
    shaped = Shaped(Network(f"{config.run_dir}/{NETWORK_FILE}"), config.network_qos.device, True)
    made = plan(
        host=looking,
        layout=layout,
        journal=journal,
        state=state,
        objects=objects,
        inputs=inputs,
        claims=claims,
        shaped=shaped,
    )
    made["problems"] = [*notes, *made["problems"]]
    if not listed and not made["pods"]:
        made["pods"] = None
    return made
