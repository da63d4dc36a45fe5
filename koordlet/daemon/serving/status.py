"""The data of `koordctl status`; docs/operations.md describes the fields."""

from __future__ import annotations

import os
import time

import msgspec
import psutil

from koordlet import VERSION
from koordlet.daemon.parts import Parts
from koordlet.planning import explain
from koordlet.planning.explain import Plain


def of_daemon(parts: Parts) -> Plain:
    """Return the daemon's state, except for passes and values (`of_reconciler`)."""
    pods, containers = parts.state.counts
    policies = parts.rules.states()
    return {
        "node": parts.node_name,
        "version": VERSION,
        "pid": os.getpid(),
        "startedAt": parts.started_at,
        "uptimeSeconds": round(parts.uptime_s, 1),
        "ready": not parts.health.not_ready(),
        "notReady": parts.health.not_ready(),
        "unhealthy": parts.health.unhealthy(),
        "nri": _nri(parts),
        "hookService": _hook_service(parts),
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
                "state": policies[each.policy.name][0],
                "why": policies[each.policy.name][1],
            }
            for each in parts.engine.states
        ],
        "strategies": _strategies(parts),
        "networkQos": parts.network_qos.as_json(),
        "evictions": parts.evictions.evictor.status(),
        "measuring": _measuring(parts),
        "reports": parts.reporting.status,
        "sitePolicies": _site(parts),
        "pods": pods,
        "containers": containers,
        "unprotected": [msgspec.structs.asdict(each) for each in parts.state.unprotected()],
        "sources": _sources(parts),
        "objects": _objects(parts),
        "cgroup": _cgroup(parts),
        "kernel": _kernel(parts),
        "memoryBytes": psutil.Process().memory_info().rss,
        "worstLoopLagMs": round(parts.health.worst_loop_lag_s * 1000, 2),
    }


def _sources(parts: Parts) -> list[Plain]:
    now = time.monotonic()
    return [
        {
            "name": each.name,
            "problem": each.problem,
            "failures": each.failures,
            "fetches": each.fetches,
            "ageSeconds": None if each.answered_at is None else round(now - each.answered_at, 1),
        }
        for each in parts.feeds.statuses
    ]


def _strategies(parts: Parts) -> list[Plain]:
    now = time.monotonic()
    return [
        {
            "name": each.name,
            "state": "on" if each.on else "off",
            "why": each.why,
            "summary": each.summary,
            "problem": each.problem,
            "claims": each.leased,
            "intervalSeconds": each.interval_s,
            "timeToLiveSeconds": each.ttl_s,
            "stepAgeSeconds": None if each.stepped_at is None else round(now - each.stepped_at, 1),
            "steps": each.steps,
            "failures": each.failures,
            "lastStepMs": round(each.took_s * 1000, 2),
            "worstStepMs": round(each.worst_s * 1000, 2),
        }
        for each in parts.dynamics.runner.statuses
    ]


def _measuring(parts: Parts) -> Plain:
    status = parts.measuring.status()
    if status is None:
        return {"enabled": parts.config.measuring.enabled, "running": False, "collectors": []}
    return {
        "enabled": True,
        "running": status.running,
        "rounds": status.rounds,
        "skippedTicks": status.skipped_ticks,
        "lastRoundMs": status.round_ms,
        "saving": status.saving,
        "collectors": [
            {
                "name": each.name,
                "state": each.state,
                "error": each.error,
                "intervalSeconds": each.interval_s,
                "ageSeconds": each.age_s,
                "tookMs": each.took_ms,
                "failures": each.failures,
                "series": each.series,
                "bytes": each.bytes,
                "leftOut": each.left_out,
            }
            for each in status.collectors
        ],
    }


def _nri(parts: Parts) -> Plain:
    supervisor, numbers = parts.nri.supervisor, parts.nri.statistics
    if supervisor is None or numbers is None:
        return {"enabled": False, "connected": False, "state": "off"}
    status = supervisor.status
    made: Plain = {
        "enabled": True,
        "connected": status.protects,
        "state": status.state.value,
        "connection": status.generation,
        "problem": status.problem,
        "socket": parts.config.nri.socket,
        "failurePolicy": {
            "configured": parts.nri.failure_policy.value,
            "inForce": parts.nri.failure_policy.in_force(
                status.runtime if status.protects else None
            ),
        },
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
            "nriReported": runtime.nri_reported,
            "generation": runtime.generation.value,
            "requestTimeoutSeconds": runtime.request_timeout_s,
            "registrationTimeoutSeconds": runtime.registration_timeout_s,
            "warnings": list(runtime.warnings),
        }
    return made


def _hook_service(parts: Parts) -> Plain:
    """Return what becomes of the runtime proxy's calls that koordlet fails."""
    config = parts.config.hook_service
    in_force = "a call goes on with kubelet's values if koordlet fails or does not answer"
    if not config.enabled:
        in_force = "no call: the hook service is off"
    elif parts.nri.protects:
        in_force = "NRI decides about new containers: answers to the proxy repeat its request"
    elif config.failure_policy == "Fail":
        in_force = "a call fails if a policy fails, or if koordlet does not answer the proxy"
    return {
        "enabled": config.enabled,
        "socket": config.socket,
        "failurePolicy": {"configured": config.failure_policy, "inForce": in_force},
    }


def _site(parts: Parts) -> Plain:
    site = parts.site
    if site is None:
        return {"enabled": False}
    return {
        "enabled": True,
        "loaded": [policy.name for policy in parts.rules.site_policies],
        "offForSubjects": {**site.hook_guard.off, **site.repair_guard.off},
    }


def _objects(parts: Parts) -> Plain:
    objects = parts.feeds.objects
    return {
        "directory": parts.config.objects_dir,
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


def _cgroup(parts: Parts) -> Plain:
    layout = parts.kernel.layout
    if layout is None:
        return {}
    return {
        "version": layout.version,
        "driver": layout.driver.value,
        "kubepods": layout.kubepods,
    }


def _kernel(parts: Parts) -> Plain:
    probed = parts.kernel.probed
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


def of_reconciler(parts: Parts) -> Plain:
    """Return the state of passes and values. Waits for a pass, so for a worker thread only."""
    reconciler = parts.passes.reconciler
    if reconciler is None:
        return {}
    stats, states = reconciler.stats, reconciler.states()
    bad = {resource for resource, state in states if state in explain.TROUBLED}
    return {
        "passes": stats.passes,
        "podUpdates": stats.pod_updates,
        "standingUpdates": stats.standing_updates,
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
        "journalLost": parts.journal.lost,
        "values": explain.counts(states),
        "troubled": [
            explain.trouble(subject, view)
            for subject, view in (reconciler.standing(bad) if bad else ())
            if view.state in explain.TROUBLED
        ],
        "restoring": [explain.orphan(view) for view in reconciler.restoring()],
    }
