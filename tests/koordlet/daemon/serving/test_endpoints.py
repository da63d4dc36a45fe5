"""What a running daemon answers: on the admin socket, and to probes and scrapers."""

from __future__ import annotations

import json
import os
import socket
import stat
import tempfile
from pathlib import Path

import pytest
import yaml

from tests.koordlet.daemon.bed import (
    NODE,
    ONE_CPU,
    SLO,
    events,
    node,
    node_object,
    request,
    run,
    until,
)
from tests.ports import free_port


def test_the_admin_socket_is_for_its_owner_only() -> None:
    async def test() -> None:
        async with node() as n, n.running():
            mode = os.stat(n.folder / "run" / "admin.sock").st_mode
            assert stat.S_IMODE(mode) == 0o600

    run(test)


def test_a_container_is_explained_from_the_field_to_the_kernel() -> None:
    async def test() -> None:
        async with node() as n:
            n.put(SLO, node_object("1.25"))
            pod = n.kubelet.add_pod(ONE_CPU)
            async with n.running():
                await n.run_pod(pod)
                path = n.kubelet.path(pod.cgroup, "cpu.max")
                await until("the pod's quota", lambda: n.kernel.text(path) == "80000 100000")
                status, answer = await n.ask("GET", f"/explain?kind=pod&name={pod.uid}")
                assert status == 200
                subject = next(s for s in answer["subjects"] if s["level"] == "pod")
                quota = next(v for v in subject["values"] if v["resource"] == "cpu.cfs_quota_us")
                assert quota["value"] == "80000"
                assert quota["state"] == "applied"
                assert quota["original"] == "100000"
                assert "cpu-normalization-ratio" in quota["winner"]["source"]
                assert quota["writes"][-1]["new"] == "80000"
                status, by_file = await n.ask("GET", f"/explain?kind=file&name={path}")
                assert status == 200
                assert by_file["subjects"][0]["subject"] == f"pod/{pod.uid}"

    run(test)


@pytest.mark.parametrize(
    ("target", "status", "words"),
    [
        ("/explain?kind=pod&name=default/nope", 404, "no pod 'default/nope'"),
        ("/explain?kind=container&name=x", 404, "no container is known on this node"),
        ("/explain?kind=file&name=/etc/passwd", 404, "koordlet does not manage /etc/passwd"),
        ("/explain?kind=cow&name=x", 400, "one of pod, container, file, subject"),
        ("/explain?kind=pod", 400, "name is missing"),
        ("/nothing", 404, "not found"),
    ],
)
def test_a_question_that_cannot_be_answered_says_why(target: str, status: int, words: str) -> None:
    async def test() -> None:
        async with node() as n, n.running():
            got, answer = await n.ask("GET", target)
            assert got == status
            assert words in (answer if isinstance(answer, str) else answer["error"])

    run(test)


def test_a_plan_shows_what_other_objects_would_write_and_writes_nothing() -> None:
    async def test() -> None:
        async with node() as n:
            n.put(SLO, node_object("1.25"))
            pod = n.kubelet.add_pod(ONE_CPU)
            async with n.running() as daemon:
                await n.run_pod(pod)
                path = n.kubelet.path(pod.cgroup, "cpu.max")
                await until("the pod's quota", lambda: n.kernel.text(path) == "80000 100000")
                before, generation = len(n.kernel.writes), daemon.parts.engine.generation
                files = {"node.yaml": yaml.safe_dump(node_object("2.0"))}
                status, answer = await n.ask("POST", "/plan", {"files": files})
                assert status == 200
                (write,) = answer["writes"]
                assert (write["old"], write["new"]) == ("80000", "50000")
                assert write["path"] == path
                assert len(n.kernel.writes) == before
                assert daemon.parts.engine.generation == generation
                status, answer = await n.ask("POST", "/plan", {"filez": {}})
                assert status == 400

    run(test)


def test_traffic_classes_are_explained_and_planned_with_all_other_values() -> None:
    async def test() -> None:
        gates = {"TCNetworkQoS": True, "CPUNormalization": True}
        async with node(featureGates=gates, networkQos={"device": "nope0"}) as n:
            n.put(SLO)
            async with n.running() as daemon:
                problem = "there is no network device nope0"
                status = daemon.parts.network_qos
                await until("a look", lambda: status.status.problems == (problem,))
                _, answer = await n.ask("GET", "/explain?kind=subject&name=node")
                (value,) = [
                    value
                    for value in answer["subjects"][0]["values"]
                    if value["resource"] == "network.device"
                ]
                assert (value["state"], value["detail"]) == ("failed", problem)
                _, answer = await n.ask("POST", "/plan", {"files": {}})
                message = f"traffic classes cannot be planned: {problem}"
                unplanned = {"file": "", "object": "network-qos", "message": message}
                assert unplanned in answer["problems"] and answer["policies"] == []
                policies = {"policies": {"netQOSPolicy": "terway-qos"}}
                other = {**SLO, "spec": {"resourceQOSStrategy": policies}}
                files = {"slo.yaml": yaml.safe_dump(other)}
                _, answer = await n.ask("POST", "/plan", {"files": files})
                assert unplanned not in answer["problems"]
                (change,) = answer["policies"]
                assert (change["policy"], change["before"], change["after"]) == (
                    "network-qos",
                    "on",
                    "off",
                )

    run(test)


def test_a_plan_has_the_steps_of_traffic_classes_behind_the_writes_of_files(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    step = {"act": "add", "name": "eth0", "resource": "network.device"}
    monkeypatch.setattr("koordlet.planning.plan.plan_network", lambda *_, **__: ([step], []))

    async def test() -> None:
        async with node() as n:
            n.put(SLO, node_object("1.25"))
            pod = n.kubelet.add_pod(ONE_CPU)
            async with n.running():
                await n.run_pod(pod)
                path = n.kubelet.path(pod.cgroup, "cpu.max")
                await until("the pod's quota", lambda: n.kernel.text(path) == "80000 100000")
                files = {"node.yaml": yaml.safe_dump(node_object("2.0"))}
                _, answer = await n.ask("POST", "/plan", {"files": files})
                assert [write["resource"] for write in answer["writes"]] == [
                    "cpu.cfs_quota_us",
                    "network.device",
                ]

    run(test)


def test_status_shows_connection_policies_and_values() -> None:
    async def test() -> None:
        async with node() as n:
            n.put(SLO, node_object("1.25"))
            pod = n.kubelet.add_pod(ONE_CPU)
            async with n.running():
                await n.run_pod(pod)
                await n.create(pod, "c1")
                status, answer = await n.ask("GET", "/status")
                assert status == 200
                assert answer["ready"] is True
                assert answer["nri"]["connected"] is True
                assert answer["nri"]["runtime"]["generation"] == "B"
                states = {policy["name"]: policy["state"] for policy in answer["policies"]}
                assert states["CPUNormalization"] == "on"
                assert states["OOMScoreAdj"] == "off"
                assert (answer["pods"], answer["containers"]) == (1, 1)
                assert answer["unprotected"] == []

    run(test)


def test_metrics_and_health_are_served() -> None:
    port = free_port()

    async def test() -> None:
        address = ("127.0.0.1", port)
        async with node(http={"address": f"127.0.0.1:{port}"}) as n:
            n.put(SLO, node_object("1.25"))
            pod = n.kubelet.add_pod(ONE_CPU)
            async with n.running():
                await n.run_pod(pod)
                await n.create(pod, "c1")
                status, body = await request(address, "GET", "/metrics")
                assert status == 200
                text = body.decode()
                for name in (
                    f'koordlet_start_time{{node="{NODE}"}}',
                    "koordlet_runtime_hook_invoked_duration_milliseconds_bucket",
                    'koordlet_nri_state{state="synced"} 1.0',
                    'koordlet_policy_state{policy="CPUNormalization",state="on"} 1.0',
                    "koordlet_reconcile_passes_total",
                    "process_resident_memory_bytes",
                ):
                    assert name in text, name
                assert (await request(address, "GET", "/healthz"))[0] == 200
                assert (await request(address, "GET", "/readyz"))[0] == 200
                status, internal = await request(address, "GET", "/internal-metrics")
                assert status == 200 and b"koordlet_container_oom_score_adj" in internal
                status, external = await request(address, "GET", "/external-metrics")
                assert status == 200 and b"koordlet_container_resource_requests" in external
                assert b"koordlet_nri" not in external
                await n.runtime.stop()
                await until("the connection is lost", lambda: n.daemon.parts.health.not_ready())
                status, body = await request(address, "GET", "/readyz")
                assert status == 503
                assert b"NRI is not connected" in body

    run(test)


def test_the_uptime_does_not_follow_the_clock_when_it_is_put_back() -> None:
    async def test() -> None:
        async with node() as n, n.running() as daemon:
            daemon.parts.started_at += 86400.0
            assert 0 <= (await n.ask("GET", "/status"))[1]["uptimeSeconds"] < 3600

    run(test)


def test_a_metrics_port_that_is_taken_costs_the_metrics_only() -> None:
    async def test() -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            address = f"127.0.0.1:{taken.getsockname()[1]}"
            async with node(http={"address": address}) as n, n.running() as daemon:
                (message,) = events(n, "http")
                assert "no metrics" in message
                assert daemon.parts.health.not_ready() == []

    run(test)


def test_an_admin_socket_that_was_removed_is_served_again() -> None:
    async def test() -> None:
        async with node() as n, n.running() as daemon:
            run_dir = n.folder / "run"
            (run_dir / "admin.sock").unlink()
            await daemon._endpoints.open_missing()
            assert (await n.ask("GET", "/status"))[0] == 200
            assert "it serves again" in events(n, "admin")[0]
            away = run_dir.rename(n.folder / "away")
            await daemon._endpoints.open_missing()
            assert "restart koordlet" in events(n, "admin")[-1]
            away.rename(run_dir)
            assert (await n.ask("GET", "/status"))[0] == 200

    run(test)


def test_the_audit_log_is_written_and_served_under_its_gates() -> None:
    port = free_port()

    async def test() -> None:
        address = ("127.0.0.1", port)
        with tempfile.TemporaryDirectory() as directory:
            async with (
                node(
                    http={"address": f"127.0.0.1:{port}"},
                    featureGates={"AuditEvents": True, "AuditEventsHTTPHandler": True},
                    audit={"directory": directory},
                ) as n,
                n.running() as daemon,
            ):
                daemon.parts.audit.note(0, "evicted", "memory is short", pod="default/web-0")
                status, body = await request(address, "GET", "/events?size=5")
                assert status == 200
                assert b'"namespace":"default","name":"web-0","reason":"evicted"' in body
                daemon.parts.audit.note(9, "left out", "its verbosity is too high")
                daemon.parts.audit.note(1, "last", "written at the end")
            lines = Path(directory, "audit.log").read_text().splitlines()
            assert ['"last"' in line for line in lines] == [False, True]

    run(test)


def test_the_audit_log_has_each_kernel_write_with_the_name_of_its_pod() -> None:
    async def test() -> None:
        with tempfile.TemporaryDirectory() as directory:
            async with (
                node(
                    featureGates={"AuditEvents": True, "CPUNormalization": True},
                    audit={"directory": directory},
                ) as n,
                n.running(),
            ):
                n.put(SLO, node_object("1.25"))
                await until("the ratio", lambda: n.daemon.parts.rules.inputs.node.annotations)
                pod = n.kubelet.add_pod(ONE_CPU)
                await n.run_pod(pod)
                path = n.kubelet.path(pod.cgroup, "cpu.max")
                await until("the pod's quota", lambda: n.kernel.text(path).startswith("80000 "))
                log = Path(directory, "audit.log")

                def entries() -> list[dict[str, str]]:
                    lines = log.read_text().splitlines() if log.exists() else ()
                    found = [json.loads(line) for line in lines]
                    return [each for each in found if path in each["message"]]

                await until("the entry", entries, timeout_s=10)
                (entry,) = entries()
                entry.pop("createdAt")
                message = entry.pop("message")
                assert entry == {
                    "type": "pod",
                    "namespace": "default",
                    "name": f"pod-{pod.uid[:4]}",
                    "reason": "runtime-hooks",
                }
                assert message.startswith(f"{path}: 100000 -> 80000: CPUNormalization: ")

    run(test)


def test_no_audit_log_without_its_gates() -> None:
    port = free_port()

    async def test() -> None:
        address = ("127.0.0.1", port)
        with tempfile.TemporaryDirectory() as directory:
            async with (
                node(http={"address": f"127.0.0.1:{port}"}, audit={"directory": directory}) as n,
                n.running() as daemon,
            ):
                daemon.parts.audit.note(0, "evicted", "memory is short")
                assert (await request(address, "GET", "/events"))[0] == 404
            assert os.listdir(directory) == []

    run(test)
