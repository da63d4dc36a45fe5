"""The admin interface: HTTP over a Unix socket under runDir that only its owner may use.

What `koordctl` asks a running daemon. Answers are JSON; an error has `error` and says what to do.
Whatever waits for a reconcile pass or reads the kernel runs in a worker thread.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import msgspec
import psutil

from hooks.subject import ContainerSubject, Pod, Subject
from koordlet import VERSION, explain, planning
from koordlet.config_file import as_tree
from koordlet.decider import Decider, Stage, pod_of
from koordlet.events import Events
from koordlet.explain import Plain
from koordlet.machine import in_nodes_view
from koordlet.objects import Directory
from koordlet.parts import Parts
from koordlet.reconciler.reports import SubjectView
from service.http_server import Request, Response, Routes, json

SOCKET: Final = "admin.sock"
MAX_BODY_BYTES: Final = 32 << 20
_LEAST_PREFIX: Final = 8
"""So many characters of an id name one thing for certain, on one node."""
_MOST_NAMED: Final = 20


class _PlanRequest(msgspec.Struct, forbid_unknown_fields=True):
    """files: name -> content of every manifest file of the directory to plan with."""

    files: dict[str, str]


class Refusal(Exception):
    """A request that cannot be served; becomes a 4xx with its message."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def admin_routes(parts: Parts) -> Routes:
    """Return the admin interface of a daemon."""
    answers = _Answers(parts)
    return {
        ("GET", "/status"): answers.served(answers.status),
        ("GET", "/explain"): answers.served(answers.explain),
        ("GET", "/events"): answers.served(answers.events),
        ("GET", "/config"): answers.served(answers.config),
        ("POST", "/plan"): answers.served(answers.plan),
    }


class _Answers:
    """One method for each path."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    def served(self, answer: Callable[[Request], Any]) -> Callable[[Request], Any]:
        """Return the handler around an answer: JSON out, refusals as errors."""

        async def serve(request: Request) -> Response:
            try:
                return json(await answer(request))
            except Refusal as refusal:
                return json({"error": str(refusal)}, refusal.status)

        return serve

    # --- events and status ---------------------------------------------------------------------

    async def events(self, request: Request) -> list[Plain]:
        return self._parts.events.as_json()

    async def config(self, request: Request) -> Plain:
        return as_tree(self._parts.config)

    async def status(self, request: Request) -> Plain:
        parts = self._parts
        pods, containers = parts.state.counts
        return {
            "node": parts.node_name,
            "version": VERSION,
            "pid": os.getpid(),
            "startedAt": parts.started_at,
            "uptimeSeconds": round(time.time() - parts.started_at, 1),
            "ready": not parts.health.not_ready(),
            "notReady": parts.health.not_ready(),
            "unhealthy": parts.health.unhealthy(),
            "nri": self._nri(),
            "engine": {
                "generation": parts.engine.generation,
                "builds": parts.rules.builds,
                "lastBuildMs": round(parts.rules.last_build_s * 1000, 2),
            },
            "policies": [
                {
                    "name": each.policy.name,
                    "gate": each.policy.gate,
                    "summary": each.policy.summary,
                    "state": parts.rules.states()[each.policy.name][0],
                    "why": parts.rules.states()[each.policy.name][1],
                }
                for each in parts.engine.states
            ],
            "sitePolicies": self._site(),
            "pods": pods,
            "containers": containers,
            "unprotected": [msgspec.structs.asdict(each) for each in parts.state.unprotected()],
            "sources": [
                {
                    "name": source.name,
                    "problem": source.problem,
                    "failures": source.failures,
                    "fetches": source.fetches,
                }
                for source in parts.feeds.statuses
            ],
            "objects": self._objects(),
            "cgroup": self._cgroup(),
            "kernel": self._kernel(),
            "reconciler": await self._in_thread(self._reconciler),
            "memoryBytes": psutil.Process().memory_info().rss,
            "worstLoopLagMs": round(parts.health.worst_loop_lag_s * 1000, 2),
        }

    def _nri(self) -> Plain:
        supervisor, numbers = self._parts.nri.supervisor, self._parts.nri.statistics
        if supervisor is None or numbers is None:
            return {"enabled": False, "connected": False, "state": "off"}
        status = supervisor.status
        made: Plain = {
            "enabled": True,
            "connected": status.protects,
            "state": status.state.value,
            "connection": status.generation,
            "problem": status.problem,
            "socket": self._parts.config.nri.socket,
            "inStateSeconds": round(status.in_state_s, 1),
            "connectedSeconds": round(numbers.connected_s, 1),
            "unprotectedSeconds": round(numbers.unprotected_s, 1),
            "dials": numbers.dials,
            "disconnections": numbers.disconnections,
            "adjustments": numbers.adjustments,
            "updates": numbers.updates,
            "missed": {reason.value: count for reason, count in numbers.missed.items()},
            "createdWhileAway": numbers.created_while_away,
            "handlerFaults": numbers.handler_faults,
            "worstReplyMs": round(
                max((h.largest for h in numbers.hook_latency.values()), default=0.0) * 1000, 3
            ),
        }
        if status.runtime is not None:
            runtime = status.runtime
            made["runtime"] = {
                "name": runtime.name,
                "version": runtime.version_text,
                "nri": ".".join(str(part) for part in runtime.nri),
                "nriTold": runtime.nri_told,
                "generation": runtime.generation.value,
                "requestTimeoutSeconds": runtime.request_timeout_s,
                "registrationTimeoutSeconds": runtime.registration_timeout_s,
                "warnings": list(runtime.warnings),
            }
        return made

    def _site(self) -> Plain:
        site = self._parts.site
        if site is None:
            return {"enabled": False}
        return {
            "enabled": True,
            "loaded": [policy.name for policy in self._parts.rules.site_policies],
            "offForSubjects": {**site.hook_guard.off, **site.repair_guard.off},
        }

    def _objects(self) -> Plain:
        objects = self._parts.feeds.objects
        return {
            "directory": self._parts.config.objects_dir,
            "nodeSLO": objects.slo is not None,
            "topology": objects.topology is not None,
            "node": objects.node is not None,
            "device": objects.device is not None,
            "pods": len(objects.pods),
            "problems": [
                {"file": each.file, "object": each.obj, "message": each.message}
                for each in objects.problems
            ],
        }

    def _cgroup(self) -> Plain:
        layout = self._parts.kernel.layout
        if layout is None:
            return {}
        return {
            "version": layout.version,
            "driver": layout.driver.value,
            "kubepods": layout.kubepods,
        }

    def _kernel(self) -> Plain:
        probed = self._parts.kernel.probed
        if probed is None:
            return {}
        return {
            "release": probed.facts.kernel_release,
            "unsupported": {
                resource.value: why
                for resource, why in probed.reasons.items()
                if resource not in probed.facts.supported
            },
        }

    def _reconciler(self) -> Plain:
        reconciler = self._parts.passes.reconciler
        if reconciler is None:
            return {}
        stats, states = reconciler.stats, reconciler.states()
        bad = {resource for resource, state in states if state in explain.TROUBLED}
        return {
            "passes": stats.passes,
            "written": stats.written,
            "failed": stats.failed,
            "restored": stats.restored,
            "foreignChanges": stats.foreign_changes,
            "crashedPasses": stats.crashed_passes,
            "lastFinishedAt": stats.last_finished_at,
            "lastCpuMs": round(stats.last.cpu_ms, 2),
            "lastWritten": stats.last.written,
            "journalRecords": stats.journal_records,
            "journalError": stats.journal_error,
            "values": explain.counts(states),
            "troubled": [
                explain.trouble(subject, view)
                for subject, view in (reconciler.standing(bad) if bad else ())
                if view.state in explain.TROUBLED
            ],
            "restoring": [explain.orphan(view) for view in reconciler.restoring()],
        }

    # --- explanations --------------------------------------------------------------------------

    async def explain(self, request: Request) -> Plain:
        """?kind=pod|container|file|subject&name=..."""
        kind, name = request.query.get("kind", ""), request.query.get("name", "")
        if not name:
            raise Refusal(400, "name is missing")
        lacks = {each.id: each.lacks for each in self._parts.state.unprotected()}
        waiting = self._parts.state.waiting_containers()
        return await self._in_thread(lambda: self._explained(kind, name, lacks, waiting))

    def _explained(
        self,
        kind: str,
        name: str,
        lacks: dict[str, tuple[str, ...]],
        waiting: Sequence[Subject],
    ) -> Plain:
        views = self._views(waiting)
        match kind:
            case "pod":
                chosen = [view for view in views if _is_pod(pod_of(view.subject), name)]
                if not chosen:
                    raise Refusal(404, f"no pod {name!r}: {_known_pods(views)}")
                # Several pods of one name come one after the other, each from its top.
                chosen.sort(key=lambda view: pod.uid if (pod := pod_of(view.subject)) else "")
            case "container":
                chosen = [view for view in views if _is_container(view.subject, name)]
                if not chosen:
                    raise Refusal(404, f"no container {name!r}: {_known_containers(views, name)}")
            case "subject":
                chosen = [view for view in views if view.subject.key == name]
                if not chosen:
                    keys = [view.subject.key for view in views]
                    raise Refusal(404, f"no subject {name!r}: {_known('subjects', keys)}")
            case "file":
                return self._file(name, views, lacks)
            case _:
                raise Refusal(400, f"kind {kind!r}: one of pod, container, file, subject")
        return {
            "subjects": [
                explain.explain(view, lacks=lacks.get(view.subject.key.partition("/")[2], ()))
                for view in chosen
            ]
        }

    def _file(
        self, path: str, views: list[SubjectView], lacks: dict[str, tuple[str, ...]]
    ) -> Plain:
        reconciler = self._parts.passes.reconciler
        assert reconciler is not None
        path = in_nodes_view(self._parts.config, os.path.normpath(path))
        found = reconciler.explain_file(path)
        by_key = {view.subject.key: view for view in views}
        values = []
        for key, slot in found:
            whole = explain.explain(by_key[key], lacks=lacks.get(key.partition("/")[2], ()))
            whole["values"] = [
                value
                for value in whole["values"]
                if (value["resource"], value["key"]) == (slot.resource.value, slot.key)
            ]
            values.append(whole)
        restoring = [explain.orphan(view) for view in reconciler.restoring() if view.path == path]
        if not values and not restoring:
            raise Refusal(
                404,
                f"koordlet wants nothing for {path}: no policy claims it, and it never wrote it",
            )
        return {"subjects": values, "restoring": restoring}

    def _views(self, waiting: Sequence[Subject]) -> list[SubjectView]:
        reconciler = self._parts.passes.reconciler
        if reconciler is None:
            raise Refusal(503, "the daemon is still starting")
        views = reconciler.explain_all()
        # What came after the last pass is explained by its decision alone.
        seen = {view.subject.key for view in views}
        snapshot = self._parts.passes.snapshot
        decider = self._decider()
        views += [
            SubjectView(subject, decider.decide(snapshot.engine, subject, Stage.RECONCILE), ())
            for subject in (*snapshot.subjects, *waiting)
            if subject.key not in seen
        ]
        return views

    # --- plans ---------------------------------------------------------------------------------

    async def plan(self, request: Request) -> Plain:
        """Body: {"files": {name: content}}."""
        parts = self._parts
        if parts.kernel.layout is None:
            raise Refusal(503, "the daemon is still starting")
        try:
            wanted = msgspec.json.decode(request.body, type=_PlanRequest)
        except (msgspec.DecodeError, RecursionError) as error:
            raise Refusal(400, f"not a plan request: {error}") from error
        layout, state, engine = parts.kernel.layout, parts.state.copy(), parts.engine
        journal = parts.journal.copy_in_memory()
        kernel_facts, config = parts.rules.inputs.kernel, parts.config
        site, decider = parts.rules.site_policies, self._decider()

        def made() -> Plain:
            files = {name: content.encode() for name, content in wanted.files.items()}
            objects = parts.feeds.with_directory(Directory("", parts.node_name).take(files))
            return planning.plan(
                host=parts.host,
                layout=layout,
                journal=journal,
                state=state,
                objects=objects,
                inputs=planning.inputs_of(
                    objects,
                    node_name=parts.node_name,
                    kernel_facts=kernel_facts,
                    config=config,
                ),
                site=site,
                guard=decider.guard,
                before=engine,
            )

        return await self._in_thread(made)

    def _decider(self) -> Decider:
        """Return a decider for one answer, in a worker thread. Its faults are no events."""
        site = self._parts.site
        decider = Decider(Events(), site_guard=site.plan_guard() if site else None)
        decider.site_names = frozenset(p.name for p in self._parts.rules.site_policies)
        return decider

    async def _in_thread(self, work: Callable[[], Plain]) -> Plain:
        return await asyncio.get_running_loop().run_in_executor(None, work)


def _is_pod(pod: Pod | None, name: str) -> bool:
    if pod is None:
        return False
    if name in (pod.uid, f"{pod.namespace}/{pod.name}", pod.name):
        return True
    return len(name) >= _LEAST_PREFIX and pod.uid.startswith(name)


def _is_container(subject: Subject, name: str) -> bool:
    if not isinstance(subject, ContainerSubject):
        return False
    pod = subject.pod
    if name in (f"{pod.namespace}/{pod.name}/{subject.name}", f"{pod.name}/{subject.name}"):
        return True
    identity = name.rpartition("://")[2]
    return len(identity) >= _LEAST_PREFIX and subject.id.startswith(identity)


def _known_pods(views: list[SubjectView]) -> str:
    names = {f"{p.namespace}/{p.name}" for v in views if (p := pod_of(v.subject))}
    return _known("pods", names) if names else "no pod is known on this node"


def _known_containers(views: list[SubjectView], name: str) -> str:
    """Return which containers there are: those of the pod that was named, if one was."""
    containers = [view.subject for view in views if isinstance(view.subject, ContainerSubject)]
    if not containers:
        return "no container is known on this node"
    of_pod = [each for each in containers if _is_pod(each.pod, name.rstrip("/"))]
    names = {f"{e.pod.namespace}/{e.pod.name}/{e.name}" for e in of_pod or containers}
    return f"{_known('containers', names)}; an id's first {_LEAST_PREFIX} characters will do too"


def _known(what: str, names: Iterable[str]) -> str:
    ordered = sorted(names)
    more = ", ..." if len(ordered) > _MOST_NAMED else ""
    return f"known {what}: {', '.join(ordered[:_MOST_NAMED])}{more}"
