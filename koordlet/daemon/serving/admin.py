"""The admin interface: HTTP over a Unix socket under runDir that only its owner may use.

`koordctl` uses it to query a running daemon. Answers are JSON; an error has the field `error`,
which says what to do. Requests that wait for a reconcile pass or read the kernel run in a worker
thread.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import msgspec

from hooks.stage import Stage
from hooks.subject import ContainerSubject, NodeSubject, Pod, PodSubject, Subject
from koordlet.configuration.config_file import as_tree
from koordlet.daemon.parts import Parts
from koordlet.daemon.serving import status
from koordlet.decisions.decider import Decider, pod_of
from koordlet.executor.network import FILE_NAME as NETWORK_QOS
from koordlet.executor.network import Network
from koordlet.node.machine import in_nodes_view
from koordlet.planning import explain, plan
from koordlet.planning.explain import Plain
from koordlet.planning.network_plan import Shaped
from koordlet.planning.network_values import values_of_node, values_of_pod
from koordlet.reconciler.reports import SubjectView
from koordlet.sources.objects import Directory
from service.events import Events
from service.http_server import Request, Response, Routes, json

SOCKET: Final = "admin.sock"
MAX_BODY_BYTES: Final = 32 << 20
"""Of a plan request. Chosen: the manifests of an objects directory with thousands of pods. Only
root may connect, so the bound is against mistakes; twice the value allows twice the memory."""
_LEAST_PREFIX: Final = 8
"""Characters of an id that may stand for it: 32 bits of a hexadecimal id, which are unique among
the thousands of ids of a node in practice. More matches are all shown."""
_MOST_NAMED: Final = 20
"""Known names that an error lists: about a screen."""


class _PlanRequest(msgspec.Struct, forbid_unknown_fields=True):
    """files: name -> content of every manifest file of the directory to plan with."""

    files: dict[str, str]


class Refusal(Exception):
    """A request that cannot be served; becomes a 4xx with its message."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def admin_routes(parts: Parts) -> Routes:
    """Return the routes of a daemon's admin interface."""
    answers = _Answers(parts)
    return {
        ("GET", "/status"): answers.served(answers.status),
        ("GET", "/explain"): answers.served(answers.explain),
        ("GET", "/events"): answers.served(answers.events),
        ("GET", "/config"): answers.served(answers.config),
        ("GET", "/top"): answers.served(answers.top),
        ("GET", "/history"): answers.served(answers.history),
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

    async def top(self, request: Request) -> Plain:
        return await self._in_thread(self._parts.showing.top)

    async def history(self, request: Request) -> Plain:
        return await self._in_thread(self._parts.showing.history)

    async def status(self, request: Request) -> Plain:
        reconciler = await self._in_thread(lambda: status.of_reconciler(self._parts))
        return status.of_daemon(self._parts) | {"reconciler": reconciler}

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
                # Pods of the same name are shown one after the other, each with its containers.
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
                self._with_network(
                    view.subject,
                    explain.explain(view, lacks=lacks.get(view.subject.key.partition("/")[2], ())),
                )
                for view in chosen
            ]
        }

    def _with_network(self, subject: Subject, explained: Plain) -> Plain:
        """Return the explanation of a subject, with what network QoS says about it."""
        status = self._parts.network_qos.status
        values: list[Plain] = []
        faults: list[Plain] = []
        if isinstance(subject, NodeSubject):
            values = values_of_node(status)
        elif isinstance(subject, PodSubject):
            values, faults = values_of_pod(status, subject.pod)
        explained["values"] += values
        explained["faults"] += faults
        return explained

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
                f"koordlet does not manage {path}: no policy claims it, and it was never written",
            )
        return {"subjects": values, "restoring": restoring}

    def _views(self, waiting: Sequence[Subject]) -> list[SubjectView]:
        reconciler = self._parts.passes.reconciler
        if reconciler is None:
            raise Refusal(503, "the daemon is still starting")
        views = reconciler.explain_all()
        # A subject that is newer than the last pass is explained by its decision alone.
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
        claims = parts.dynamics.board.claims
        # A reader of its own: one thread at a time uses one.
        shaped = Shaped(Network(f"{config.run_dir}/{NETWORK_QOS}"), config.network_qos.device)

        def made() -> Plain:
            files = {name: content.encode() for name, content in wanted.files.items()}
            objects = parts.feeds.with_directory(Directory("", parts.node_name).take(files))
            return plan.plan(
                host=parts.host,
                layout=layout,
                journal=journal,
                state=state,
                objects=objects,
                inputs=plan.inputs_of(
                    objects,
                    node_name=parts.node_name,
                    kernel_facts=kernel_facts,
                    config=config,
                ),
                site=site,
                decide=decider.repair,
                before=engine,
                claims=claims,
                shaped=shaped,
            )

        return await self._in_thread(made)

    def _decider(self) -> Decider:
        """Return a decider for one answer in a worker thread. Its faults do not become events."""
        site = self._parts.site
        decider = Decider(Events(), site_guard=site.plan_guard() if site else None)
        decider.site_names = frozenset(p.name for p in self._parts.rules.site_policies)
        decider.standing = self._parts.hook_decider.standing
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
    """Return the known containers: those of the named pod, if `name` is a pod's."""
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
