"""The daemon as a whole, on a simulated kernel with a fake runtime."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import stat
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from koordlet import requests_log
from koordlet.kubepods_lock import KubepodsLock
from linux.resources import Resource
from nri_plugin.node_lock import LockHeld, lock_directory
from tests.koordlet.builders import pod_manifest
from tests.koordlet.node import NODE, SLO, Node, node, node_object, request, until
from tests.ports import free_port
from tests.simulated import ANOLIS_8, DEBIAN_12_V1, Kubelet
from tests.simulated.kubelet import Limits
from tests.simulated.profiles import Driver

OTHER_DRIVER = Driver.CGROUPFS
ONE_CPU = Limits(cpu_request_milli=1000, cpu_limit_milli=1000)


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 30))


def events(node_: Node, kind: str) -> list[str]:
    return [event.message for event in node_.daemon.parts.events.latest() if event.kind == kind]


def ls_manifest(uid: str) -> dict[str, Any]:
    """The manifest of a pod of one CPU."""
    resources = {"limits": {"cpu": "1"}, "requests": {"cpu": "1"}}
    manifest = pod_manifest(
        uid=uid,
        spec={"containers": [{"name": "main", "resources": resources}]},
        status={"phase": "Running", "qosClass": "Burstable"},
    )
    manifest["metadata"]["labels"] = {"koordinator.sh/qosClass": "LS"}
    return manifest


def test_a_container_is_created_with_its_values_and_the_kernel_follows() -> None:
    async def test() -> None:
        async with node() as n:
            n.put(SLO, node_object("1.25"))
            pod = n.kubelet.add_pod(ONE_CPU)
            async with n.running():
                await n.run_pod(pod)
                created = await n.create(pod, "c1")
                assert created.adjust.linux.resources.cpu.quota.value == 80_000
                path = n.kubelet.path(pod.cgroup, "cpu.max")
                await until("the pod's quota", lambda: n.kernel.text(path) == "80000 100000")

    run(test)


def test_values_follow_the_objects_and_come_back_without_them() -> None:
    async def test() -> None:
        async with node() as n:
            n.put(SLO)
            pod = n.kubelet.add_pod(ONE_CPU)
            path = n.kubelet.path(pod.cgroup, "cpu.max")
            async with n.running():
                await n.run_pod(pod)
                await n.create(pod, "c1")
                n.put(node_object("2.0"))
                await until("half the quota", lambda: n.kernel.text(path) == "50000 100000")
                n.put(node_object("1.6"))
                await until("another ratio", lambda: n.kernel.text(path) == "62500 100000")
                (n.folder / "objects.d" / f"Node-{NODE}.yaml").unlink()
                await until("the original", lambda: n.kernel.text(path) == "100000 100000")

    run(test)


def test_an_in_place_resize_is_divided_once() -> None:
    async def test() -> None:
        async with node() as n:
            n.put(SLO, node_object("1.25"))
            pod = n.kubelet.add_pod(ONE_CPU)
            async with n.running():
                await n.run_pod(pod)
                created = await n.create(pod, "c1")
                asked = type(created.container.linux.resources)()
                asked.cpu.quota.value = 50_000
                asked.cpu.period.value = 100_000
                final = await n.runtime.update_container("c1", asked)
                assert final.cpu.quota.value == 40_000

    run(test)


def test_what_kubelet_asked_for_is_known_after_a_restart() -> None:
    async def test() -> None:
        async with node() as n:
            n.put(SLO, node_object("2.0"))
            pod = n.kubelet.add_pod(ONE_CPU)
            async with n.running():
                await n.run_pod(pod)
                await n.create(pod, "c1")
                await n.runtime.start_container("c1")
            # The runtime now shows 50000, which is ours; halving it again would be wrong.
            n.daemon = n.new_daemon()
            async with n.running():
                state = n.daemon.parts.state.container("c1")
                assert state is not None
                assert state.requested.cfs_quota_us == 100_000
                assert n.daemon.parts.state.unprotected() == []

    run(test)


def test_a_pod_grows_with_its_container_where_only_the_runtime_tells() -> None:
    """The runtime tells of a pod's own values at its start alone."""

    async def test() -> None:
        async with node() as n:
            n.put(SLO, node_object("1.25"))
            pod = n.kubelet.add_pod(ONE_CPU)
            path = n.kubelet.path(pod.cgroup, "cpu.max")
            async with n.running():
                await n.run_pod(pod)
                created = await n.create(pod, "c1")
                await n.runtime.start_container("c1")
                await until("the pod's quota", lambda: n.kernel.text(path) == "80000 100000")
                n.kernel.write_as("kubelet", path, "200000 100000")
                asked = type(created.container.linux.resources)()
                asked.cpu.quota.value = 200_000
                asked.cpu.period.value = 100_000
                await n.runtime.update_container("c1", asked)
                await until("the new quota", lambda: n.kernel.text(path) == "160000 100000")
                n.put(node_object("1.0"))
                await until("kubelet's", lambda: n.kernel.text(path) == "200000 100000")

    run(test)


def test_a_resize_while_the_daemon_is_away_is_divided_once_and_given_back() -> None:
    async def test() -> None:
        async with node() as n:
            n.put(SLO, node_object("1.25"))
            pod = n.kubelet.add_pod(ONE_CPU)
            async with n.running():
                await n.run_pod(pod)
                created = await n.create(pod, "c1")
                await n.runtime.start_container("c1")
            asked = type(created.container.linux.resources)()
            asked.cpu.quota.value = 50_000
            asked.cpu.period.value = 100_000
            await n.runtime.update_container("c1", asked)
            for _ in range(2):  # what was found out is kept over another restart
                n.daemon = n.new_daemon()
                async with n.running():
                    state = n.daemon.parts.state.container("c1")
                    assert state is not None
                    assert state.requested.cfs_quota_us == 50_000
                    cpu = n.runtime.containers["c1"].linux.resources.cpu
                    assert cpu.quota.value == 40_000

    run(test)


def test_requests_are_remembered_however_many_there_were(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(requests_log, "_REWRITE_AFTER", 8)

    async def test() -> None:
        async with node() as n:
            n.put(SLO, node_object("2.0"))
            pod = n.kubelet.add_pod(ONE_CPU)
            async with n.running():
                await n.run_pod(pod)
                for number in range(30):
                    await n.create(pod, f"c{number}")
                    if number:
                        await n.runtime.remove_container(f"c{number - 1}")
                path = n.folder / "run" / "requests.log"
                await until("the last request", lambda: b"c29" in path.read_bytes())
                assert len(path.read_bytes().splitlines()) < 12

    run(test)


def test_a_bad_field_of_the_nodeslo_costs_that_field_only() -> None:
    async def test() -> None:
        async with node() as n:
            good = yaml.safe_load(yaml.safe_dump(SLO))
            good["spec"] = {"cpuBurstStrategy": {"cpuBurstPercent": 500}}
            n.put(good)
            async with n.running():
                bad = yaml.safe_load(yaml.safe_dump(good))
                bad["spec"]["cpuBurstStrategy"]["cpuBurstPercent"] = "many"
                bad["spec"]["systemStrategy"] = {"minFreeKbytesFactor": 42}
                n.put(bad)
                await until("the problem", lambda: n.daemon.parts.feeds.objects.problems)
                slo = n.daemon.parts.rules.inputs.slo
                assert slo.cpu_burst_strategy.cpu_burst_percent == 500
                assert slo.system_strategy.min_free_kbytes_factor == 42
                (message,) = events(n, "bad-object")
                assert "spec.cpuBurstStrategy.cpuBurstPercent = 'many'" in message
                assert "the last good value 500 stays" in message

    run(test)


def test_a_broken_file_keeps_its_last_good_objects() -> None:
    async def test() -> None:
        async with node() as n:
            n.put(SLO, node_object("1.5"))
            async with n.running():
                n.put_text(f"Node-{NODE}.yaml", "a: [unclosed")
                await until("the problem", lambda: n.daemon.parts.feeds.objects.problems)
                annotations = n.daemon.parts.rules.inputs.node.annotations
                assert annotations["node.koordinator.sh/cpu-normalization-ratio"] == "1.5"

    run(test)


def test_the_daemon_works_before_the_runtime_is_there_and_joins_it_later() -> None:
    async def test() -> None:
        async with node(runtime=False) as n:
            n.put(SLO, node_object("1.25"))
            pod = n.kubelet.add_pod(ONE_CPU)
            async with n.running() as daemon:
                assert any(
                    "NRI is not connected" in reason for reason in daemon.parts.health.not_ready()
                )
                async with n.runtime.running():
                    await n.runtime.synchronized(1)
                    await n.run_pod(pod)
                    created = await n.create(pod, "c1")
                    assert created.adjust.linux.resources.cpu.quota.value == 80_000
                    assert daemon.parts.health.not_ready() == []

    run(test)


def test_a_pod_of_a_manifest_is_kept_without_any_runtime() -> None:
    async def test() -> None:
        async with node(runtime=False, nri={"enabled": False}) as n:
            pod = n.kubelet.add_pod(ONE_CPU)
            n.put(SLO, node_object("1.25"), ls_manifest(pod.uid))
            async with n.running() as daemon:
                path = n.kubelet.path(pod.cgroup, "cpu.max")
                await until("the pod's quota", lambda: n.kernel.text(path) == "80000 100000")
                assert daemon.parts.health.not_ready() == []

    run(test)


def pods_directory(folder: Path) -> tuple[Path, KubepodsLock]:
    """A directory of our own in place of the simulated kernel's pods' root, and its lock."""
    path = folder / "kubepods"
    path.mkdir()
    return path, KubepodsLock(lambda _: str(path))


def test_beside_another_daemon_of_the_same_pods_it_does_not_start(tmp_path: Path) -> None:
    async def test() -> None:
        async with node(runtime=False, nri={"enabled": False}) as n:
            path, n.lock = pods_directory(tmp_path)
            n.daemon = n.new_daemon()
            pod = n.kubelet.add_pod(ONE_CPU)
            n.put(SLO, node_object("1.25"), ls_manifest(pod.uid))
            before = len(n.kernel.writes)
            other = lock_directory(str(path))
            with pytest.raises(LockHeld, match=f"process {os.getpid()} holds {path}"):
                async with n.running():
                    pass
            assert len(n.kernel.writes) == before
            os.close(other)
            n.daemon = n.new_daemon()
            async with n.running():
                quota = n.kubelet.path(pod.cgroup, "cpu.max")
                await until("the pod's quota", lambda: n.kernel.text(quota) == "80000 100000")

    run(test)


def test_a_daemon_that_meets_another_at_pods_made_anew_stops_and_writes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        async with node(runtime=False, nri={"enabled": False}) as n:
            path, n.lock = pods_directory(tmp_path)
            n.daemon = n.new_daemon()
            pod = n.kubelet.add_pod(ONE_CPU)
            n.put(SLO, ls_manifest(pod.uid))
            async with n.running() as daemon:
                (tmp_path / "new").mkdir()
                other = lock_directory(str(tmp_path / "new"))
                path.rename(tmp_path / "gone")
                (tmp_path / "new").rename(path)
                before = len(n.kernel.writes)
                n.put(node_object("1.25"))
                await until("the daemon gives way", lambda: daemon.failed)
            assert len(n.kernel.writes) == before
            assert (
                f"another daemon runs on this node, stopping: process {os.getpid()}" in caplog.text
            )
            os.close(other)

    run(test)


def test_reloading_switches_a_gate_off_and_gives_the_values_back() -> None:
    async def test() -> None:
        async with node() as n:
            n.put(SLO, node_object("2.0"))
            pod = n.kubelet.add_pod(ONE_CPU)
            path = n.kubelet.path(pod.cgroup, "cpu.max")
            async with n.running() as daemon:
                await n.run_pod(pod)
                await n.create(pod, "c1")
                await until("half the quota", lambda: n.kernel.text(path) == "50000 100000")
                n.tree["featureGates"] = {"CPUNormalization": False}
                n.tree["nri"] = {**n.tree["nri"], "pluginIndex": "10"}
                n.tree["log"] = {"format": "json"}
                daemon.reload()
                await until("the original", lambda: n.kernel.text(path) == "100000 100000")
                assert events(n, "restart-needed") == [
                    "a restart is needed to change log.format, nri.pluginIndex"
                ]

    run(test)


def test_a_bad_configuration_at_reload_leaves_the_old_one_in_force() -> None:
    async def test() -> None:
        async with node() as n, n.running() as daemon:
            n.tree["featureGates"] = {"CPUNormalisation": True}
            daemon.reload()
            (message,) = events(n, "bad-config")
            assert "did you mean CPUNormalization?" in message
            assert daemon.parts.config.feature_gates["CPUNormalization"]

    run(test)


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
        ("/explain?kind=file&name=/etc/passwd", 404, "koordlet wants nothing for /etc/passwd"),
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


def test_status_tells_connection_policies_and_values() -> None:
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


def test_a_site_policy_claims_and_a_slow_one_is_switched_off(tmp_path: Path) -> None:
    directory = tmp_path / "policies.d"
    directory.mkdir(mode=0o755)
    (directory / "half.py").write_text(
        "from hooks.site import site_policy, want\n"
        "from linux.resources import Resource\n"
        "def pod(inputs, subject):\n"
        "    yield want(Resource.CPU_CFS_QUOTA, 55000, reason='the site says so')\n"
        "POLICY = site_policy(name='half', summary='a quota', pod=pod)\n"
    )
    (directory / "slow.py").write_text(
        "from hooks.site import site_policy\n"
        "def pod(inputs, subject):\n"
        "    while True:\n"
        "        pass\n"
        "POLICY = site_policy(name='slow', summary='never ends', pod=pod)\n"
    )

    async def test() -> None:
        site = {"enabled": True, "directory": str(directory), "timeLimit": "20ms"}
        async with node(sitePolicies=site) as n:
            n.put(SLO)
            pod = n.kubelet.add_pod(ONE_CPU)
            async with n.running():
                await n.run_pod(pod)
                path = n.kubelet.path(pod.cgroup, "cpu.max")
                await until("the site's quota", lambda: n.kernel.text(path) == "55000 100000")
                (message,) = events(n, "site-policy-off")
                assert "site/slow took longer than 20 ms" in message
                (directory / "half.py").unlink()
                await until("the original", lambda: n.kernel.text(path) == "100000 100000")

    run(test)


def forget_pods_root(n: Node) -> None:
    """As on a node that never had a pod."""
    for cgroup in (n.kubelet.qos_dir("Burstable"), n.kubelet.qos_dir("BestEffort")):
        n.kernel.remove_group(cgroup)
    n.kernel.remove_group(n.kubelet.root)


def test_on_a_fresh_node_the_first_pod_shows_where_pods_live() -> None:
    async def test() -> None:
        async with node() as n:
            n.put(SLO, node_object("1.25"))
            forget_pods_root(n)
            async with n.running() as daemon:
                assert daemon.parts.kernel.layout is not None
                assert daemon.parts.kernel.layout.kubepods == ""
                n.kubelet = Kubelet(n.kernel)
                pod = n.kubelet.add_pod(ONE_CPU)
                await n.run_pod(pod)
                path = n.kubelet.path(pod.cgroup, "cpu.max")
                await until("the pod's quota", lambda: n.kernel.text(path) == "80000 100000")
                assert daemon.parts.kernel.layout.kubepods == n.kubelet.root
                assert daemon.parts.kernel.probed is not None
                assert Resource.CPU_CFS_QUOTA in daemon.parts.kernel.probed.facts.supported

    run(test)


def test_what_was_probed_with_the_first_pod_counts_for_what_is_written(tmp_path: Path) -> None:
    """Alibaba's kernel takes a burst above the quota; that can be tried where pods live only."""
    directory = tmp_path / "policies.d"
    directory.mkdir(mode=0o755)
    (directory / "burst.py").write_text(
        "from hooks.site import site_policy, want\n"
        "from linux.resources import Resource\n"
        "def pod(inputs, subject):\n"
        "    yield want(Resource.CPU_CFS_BURST, 300000, reason='the site says so')\n"
        "POLICY = site_policy(name='burst', summary='a burst', pod=pod)\n"
    )

    async def test() -> None:
        site = {"enabled": True, "directory": str(directory)}
        async with node(ANOLIS_8, sitePolicies=site) as n:
            n.put(SLO)
            forget_pods_root(n)
            async with n.running():
                n.kubelet = Kubelet(n.kernel)
                pod = n.kubelet.add_pod(ONE_CPU)
                await n.run_pod(pod)
                path = n.kubelet.path(pod.cgroup, "cpu.cfs_burst_us")
                await until("the burst above the quota", lambda: n.kernel.text(path) == "300000")

    run(test)


def test_another_cgroup_driver_is_noticed_when_more_pods_lie_in_its_root() -> None:
    """kubelet was restarted with another driver; the root of before stays, and so may its pods."""

    async def test() -> None:
        async with node() as n:
            n.put(SLO, node_object("1.25"))
            before = n.kubelet.add_pod(ONE_CPU)
            async with n.running() as daemon:
                await n.run_pod(before)
                n.kubelet = Kubelet(n.kernel, driver=OTHER_DRIVER)
                assert not before.cgroup.startswith(f"{n.kubelet.root}/")
                for number in range(2):
                    pod = n.kubelet.add_pod(ONE_CPU, uid=f"moved-{number}")
                    await n.run_pod(pod)
                    await daemon.sweep()
                    assert daemon.parts.kernel.layout is not None
                    known = daemon.parts.kernel.layout.kubepods
                    assert (known == n.kubelet.root) is (number == 1)
                path = n.kubelet.path(pod.cgroup, "cpu.max")
                await until("the pod's quota", lambda: n.kernel.text(path) == "80000 100000")

    run(test)


def test_a_pods_root_that_is_gone_is_looked_for_again_and_kept_while_there_is_no_other() -> None:
    async def test() -> None:
        async with node() as n, n.running() as daemon:
            layout = daemon.parts.kernel.layout
            assert layout is not None
            forget_pods_root(n)
            await daemon.sweep()
            assert daemon.parts.kernel.layout is layout
            n.kubelet = Kubelet(n.kernel, driver=OTHER_DRIVER)
            await daemon.sweep()
            assert daemon.parts.kernel.layout.kubepods == n.kubelet.root

    run(test)


def test_sandboxes_that_the_runtime_forgot_to_end_are_dropped() -> None:
    """containerd tells nothing of the end of pods that ran before its restart."""

    async def test() -> None:
        async with node() as n:
            n.put(SLO)
            pod = n.kubelet.add_pod(ONE_CPU)
            async with n.running() as daemon:
                await n.run_pod(pod)
                assert daemon.parts.state.counts == (1, 0)
                n.kubelet.remove_pod(pod)
                await daemon.sweep()
                assert daemon.parts.state.counts == (1, 0)
                await daemon.sweep()
                assert daemon.parts.state.counts == (0, 0)

    run(test)


def test_a_container_starts_though_a_cpu_went_offline() -> None:
    """On cgroup v1 it has left every group for good, and what is asked for besides is refused."""

    async def test() -> None:
        async with node(DEBIAN_12_V1) as n:
            n.put(SLO)
            async with n.running() as daemon:
                rules, reconciler = daemon.parts.rules, daemon.parts.passes.reconciler
                assert reconciler is not None
                n.kernel.set_online(0, online=False)
                reconciler.trigger("test")
                await until("a pass", lambda: str(rules.inputs.kernel.pods_cpus) == "1-3")
                facts = rules.inputs.kernel
                n.kernel.set_online(0, online=True)
                passes = reconciler.stats.passes
                reconciler.trigger("test")
                await until("a pass", lambda: reconciler.stats.passes > passes)
                assert rules.inputs.kernel == facts

    run(test)


def test_a_kernel_that_cannot_be_probed_any_more_is_told_of_and_stays_as_it_was_known() -> None:
    async def test() -> None:
        async with node() as n, n.running() as daemon:
            facts = daemon.parts.rules.inputs.kernel
            with pytest.MonkeyPatch.context() as patched:
                patched.setattr("koordlet.kernel.probe", _refused)
                await daemon.parts.kernel.probe_again()
            assert daemon.parts.rules.inputs.kernel == facts
            (message,) = events(n, "kernel")
            assert "Input/output error" in message
            await daemon.parts.kernel.probe_again()
            assert daemon.parts.rules.inputs.kernel == facts

    run(test)


def _refused(*_: object) -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def test_a_node_whose_passes_fail_is_not_ready() -> None:
    async def test() -> None:
        async with node() as n, n.running() as daemon:
            reconciler = daemon.parts.passes.reconciler
            assert reconciler is not None
            with pytest.MonkeyPatch.context() as patched:
                patched.setattr(reconciler, "_snapshot_source", _refused)
                reconciler.trigger("test")
                await until("a crash", lambda: reconciler.stats.crashed_passes)
                (reason,) = daemon.parts.health.not_ready()
                assert "OSError" in reason and "Input/output error" in reason
            reconciler.trigger("test")
            await until("a pass", lambda: daemon.parts.health.not_ready() == [])

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


def test_a_journal_that_takes_nothing_is_told_once_and_when_it_does_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(path: str) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    caplog.set_level("INFO")

    async def test() -> None:
        async with node() as n, n.running() as daemon:
            journal = daemon.parts.journal
            with monkeypatch.context() as patched:
                patched.setattr(journal, "_compact", full)
                patched.setattr(journal, "_behind", True)
                for ratio in ("1.5", "1.6"):
                    n.put(node_object(ratio))
                    await until("a pass", lambda: "no kernel file is written" in caplog.text)
            journal._behind = True
            n.put(node_object("1.7"))
            await until("a pass", lambda: "kernel files written" in caplog.text)
            assert caplog.text.count("no kernel file is written") == 1

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


def test_containers_that_never_started_leave_nothing_in_the_journal() -> None:
    async def test() -> None:
        async with node() as n:
            n.put(SLO, node_object("1.25"))
            pod = n.kubelet.add_pod(ONE_CPU)
            async with n.running() as daemon:
                await n.run_pod(pod)
                for number in range(5):
                    await n.create(pod, f"c{number}")
                    await n.runtime.remove_container(f"c{number}")
                n.put(node_object("1.5"))
                await until("a pass", lambda: not daemon.parts.journal.containers_with_deliveries())
                n.put(node_object("1.6"))
                path = n.kubelet.path(pod.cgroup, "cpu.max")
                await until("another pass", lambda: n.kernel.text(path) == "62500 100000")
                assert daemon.parts.journal.containers_with_deliveries() == []

    run(test)
