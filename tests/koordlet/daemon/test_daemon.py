"""The daemon as a whole, on a simulated kernel with a fake runtime."""

from __future__ import annotations

import errno
import os
from functools import partial
from pathlib import Path

import pytest
import yaml

from koordctl.status import status_text
from koordlet.transports import nri_link
from nri_plugin.options import Options
from service import append_log
from tests.fake_runtime.adaptation import Behaviour, EventFailed
from tests.fake_runtime.profiles import D_POLICY, A, B
from tests.fake_runtime.profiles import Profile as RuntimeProfile
from tests.koordlet.daemon.bed import (
    NODE,
    ONE_CPU,
    SLO,
    events,
    ls_manifest,
    node,
    node_object,
    run,
    until,
)
from tests.koordlet.executor.bed import fill_disk
from tests.simulated import DEBIAN_12_V1


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


def test_a_runtime_that_sends_no_list_is_reported_and_known_pods_are_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(nri_link, "Options", partial(Options, list_overdue_s=0.1))

    async def test() -> None:
        async with node() as n:
            n.runtime.profile = A
            n.runtime.behaviour = Behaviour(never_synchronize=True)
            n.listening = False
            pod = n.kubelet.add_pod(ONE_CPU)
            n.put(SLO, node_object("1.25"), ls_manifest(pod.uid))
            async with n.running() as daemon:
                await until("the event", lambda: events(n, "nri-unlisted"))
                (message,) = events(n, "nri-unlisted")
                assert "containerd 1.7.24~ds1 configured the plugin and sends no list" in message
                path = n.kubelet.path(pod.cgroup, "cpu.max")
                await until("the pod's quota", lambda: n.kernel.text(path) == "80000 100000")
                _, status = await n.ask("GET", "/status")
                assert "sends no list" in status["nri"]["problem"]
                assert any("sends no list" in reason for reason in status["notReady"])
                n.runtime.behaviour = Behaviour()
                await until("the list", lambda: daemon.parts.health.not_ready() == [])

    run(test)


@pytest.mark.parametrize(
    ("profile", "late"),
    [(B, "after a late answer or the loss of"), (D_POLICY, "errors, late answers and the loss of")],
    ids=lambda value: getattr(value, "nri", ""),
)
def test_fail_refuses_a_container_whose_annotation_is_bad_and_says_what_holds(
    profile: RuntimeProfile, late: str
) -> None:
    async def test() -> None:
        async with node() as n:
            n.runtime.profile = profile
            n.tree["nri"] = {**n.tree["nri"], "failurePolicy": "Fail"}
            n.daemon = n.new_daemon()
            n.put(SLO)
            pod, bad = n.kubelet.add_pod(ONE_CPU), n.kubelet.add_pod(ONE_CPU)
            async with n.running():
                await n.run_pod(pod)
                await n.create(pod, "c1")
                annotation = {"scheduling.koordinator.sh/resource-status": "no JSON"}
                await n.run_pod(bad, annotations=annotation)
                with pytest.raises(EventFailed, match=r"policy CPUSetAllocator: .*resource-status"):
                    await n.create(bad, "c2")
                _, status = await n.ask("GET", "/status")
                policy = status["nri"]["failurePolicy"]
                assert policy["configured"] == "Fail"
                assert policy["inForce"].startswith(("errors", late))
                assert late in policy["inForce"]
                assert f"Fail: {policy['inForce']}" in " ".join(status_text(status).split())

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


def test_sandboxes_that_the_runtime_forgot_to_end_are_dropped() -> None:
    """containerd does not report the end of pods that ran before its restart."""

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
    """On cgroup v1 it has left every group for good, and the kernel refuses a list with it."""

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


def test_a_kernel_that_cannot_be_probed_any_more_is_reported_and_stays_as_it_was_known() -> None:
    async def test() -> None:
        async with node() as n, n.running() as daemon:
            facts = daemon.parts.rules.inputs.kernel
            with pytest.MonkeyPatch.context() as patched:
                patched.setattr("koordlet.daemon.node_kernel.probe_kernel", _refused)
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


def test_a_journal_that_takes_nothing_is_reported_once_and_its_recovery_too(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(descriptor: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    caplog.set_level("INFO")

    async def test() -> None:
        async with node() as n, n.running() as daemon:
            journal = daemon.parts.journal
            n.put(SLO, node_object("1.25"))
            pod = n.kubelet.add_pod(ONE_CPU)
            await n.run_pod(pod)
            await n.create(pod, "c1")
            await until("the pod's original", lambda: len(journal) > 0)
            with monkeypatch.context() as patched:
                fill_disk(journal)
                patched.setattr(append_log, "_write_all", full)
                for ratio in ("1.5", "1.6"):
                    n.put(node_object(ratio))
                    await until("a pass", lambda: "no kernel file is written" in caplog.text)
            n.put(node_object("1.7"))
            await until("a pass", lambda: "is written again" in caplog.text)
            assert caplog.text.count("no kernel file is written") == 1

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
                # The pass forgets them after its writes.
                await until(
                    "the deliveries are forgotten",
                    lambda: not daemon.parts.journal.containers_with_deliveries(),
                )

    run(test)
