"""Strategies under real load in real containers: what the kernel has meanwhile and afterwards.

The load of other programs on this machine counts as the system's, and may leave best-effort pods
nothing. So no test expects an amount of CPU, but that the kernel has what follows from the terms
that the daemon shows; and every limit of time is generous.
"""

from __future__ import annotations

import json
import os
import re
import signal
import threading
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from koordctl.client import Client
from koordlet.qos.recording.replay import Replayed, paths_of, replay
from koordlet.qos.strategies.registry import STRATEGIES
from tests.beds.containerd import Containerd
from tests.beds.daemon import Daemon, daemon
from tests.beds.kubelet import RunningPod, running_pod
from tests.e2e.manifests import CPUS, FIRST, Manifest, node, nodeslo, pinned_pod, pod
from tests.e2e.observe import all_values, container_value, pod_value, settled_values
from tests.waiting import wait_until

pytestmark = [
    pytest.mark.containerd,
    # Use by other programs on the machine suppresses best-effort pods and holds bursts back.
    pytest.mark.alone,
    pytest.mark.skipif(len(CPUS) < 2, reason="needs two CPUs: one is taken by a pod of its own"),
]

_SPIN = ["/bin/sh", "-c", "while :; do :; done"]
_PATIENCE_S = 90.0
_REST = ",".join(map(str, CPUS[1:]))
_EVERYTHING = ",".join(map(str, CPUS))


def suppressing(policy: str, **fields: Any) -> Manifest:
    """A NodeSLO with suppression; the threshold is low, so that one busy core is above it."""
    slo = nodeslo()
    slo["spec"]["resourceUsedThresholdWithBE"] = {
        "enable": True,
        "cpuSuppressPolicy": policy,
        "cpuSuppressThresholdPercent": 95,
        **fields,
    }
    return slo


def bursting(policy: str) -> Manifest:
    slo = nodeslo()
    slo["spec"]["cpuBurstStrategy"] = {"policy": policy, "sharePoolThresholdPercent": 100}
    return slo


def service() -> Manifest:
    """A latency-sensitive pod without a limit, whose process needs a whole CPU."""
    return pod("web", "LS", requests={"cpu": "500m"}, command=_SPIN)


def besteffort(bed: Containerd, name: str) -> str:
    return bed.groups.read(f"{bed.groups.path}/besteffort", name)


def quota(bed: Containerd) -> int:
    """The CFS quota of all best-effort pods in µs, -1 for none."""
    return int(besteffort(bed, "cpu.cfs_quota_us"))


def throttled(bed: Containerd) -> int:
    """How often best-effort pods were throttled together."""
    lines = dict(each.split() for each in besteffort(bed, "cpu.stat").splitlines())
    return int(lines["nr_throttled"])


def cpus_of(bed: Containerd, running: RunningPod) -> set[str]:
    """The CPUs on which the kernel lets the processes of container "main" run."""
    seen = set()
    for pid in bed.groups.read(running.container_cgroup("main"), "cgroup.procs").split():
        status = Path(f"/proc/{pid}/status").read_text()
        seen.add(next(x.split()[1] for x in status.splitlines() if x.startswith("Cpus_allowed_l")))
    return seen


def strategy(koordlet: Daemon, name: str) -> dict[str, Any]:
    """What `koordctl status` shows of a strategy."""
    strategies = Client(str(koordlet.run_dir)).get("/status")["strategies"]
    return next(each for each in strategies if each["name"] == name)


@pytest.fixture(autouse=True)
def weighty(bed: Containerd) -> None:
    """Let the pods get CPU time on a machine that is busy with other programs."""
    root = bed.groups.path.rpartition("/")[0]
    bed.groups.file(root, "cpu.shares").write_text(str(bed.groups.weight(16_384)))


def released(bed: Containerd, koordlet: Daemon) -> bool:
    """Whether best-effort pods have what the formula leaves them without load of the service."""
    summary = strategy(koordlet, "BECPUSuppress")["summary"]
    found = re.fullmatch(r"best-effort pods with ([\d.]+) cores: (.+) = (-?[\d.]+) cores", summary)
    if found is None or "- LS 0.0 " not in found[2]:
        return False
    has, left = float(found[1]), max(float(found[3]), 0.02)
    return quota(bed) == round(has * 100_000) and has > left - 0.02 * len(CPUS) - 0.05


def used_by_ls(koordlet: Daemon) -> float:
    """Cores of latency-sensitive pods as suppression sees them; -1 before it measured."""
    found = re.search(r"- LS ([0-9.]+)", strategy(koordlet, "BECPUSuppress")["summary"])
    return float(found[1]) if found else -1.0


def wait(condition: Any, what: str) -> None:
    wait_until(condition, what, timeout_s=_PATIENCE_S, every_s=0.1)


@contextmanager
def untouched_afterwards(bed: Containerd) -> Iterator[None]:
    """Every file of the groups that stay must be as before, byte by byte."""
    before = settled_values(bed)
    yield
    wait(lambda: all_values(bed) == before, "every value is as before")


class Seen:
    """What the kernel had and what status showed, one after the other."""

    def __init__(self) -> None:
        self.quotas: list[int] = []
        self.summaries: list[str] = []

    def look(self, bed: Containerd, koordlet: Daemon) -> None:
        if self.quotas[-1:] != [now := quota(bed)]:
            self.quotas.append(now)
        if self.summaries[-1:] != [shown := strategy(koordlet, "BECPUSuppress")["summary"]]:
            self.summaries.append(shown)


@contextmanager
def seen(bed: Containerd, koordlet: Daemon) -> Iterator[Seen]:
    """Look all the time in a thread, until the block ends."""
    found = Seen()
    over = threading.Event()

    def look() -> None:
        while not over.wait(0.1):
            found.look(bed, koordlet)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield found
    finally:
        over.set()
        thread.join()


def suppressions(recording: Path) -> list[Replayed]:
    """What suppression decided in each round, from a recording."""
    rounds = replay(paths_of(str(recording)), STRATEGIES)
    return [each for decided in rounds for each in decided if each.strategy == "BECPUSuppress"]


def quota_claimed(decided: Replayed) -> int:
    """The quota of the besteffort directory, -1 without a claim."""
    found = re.search(r"kubeqos/BestEffort cpu.cfs_quota_us set (\d+)", "\n".join(decided.claims))
    return int(found[1]) if found else -1


def is_in_order(some: Iterable[object], of: Iterable[object]) -> bool:
    """Whether all of the first are among the second, in the same order."""
    rest = iter(of)
    return all(each in rest for each in some)


def test_best_effort_pods_yield_to_load_and_get_their_cpu_back(
    bed: Containerd, tmp_path: Path
) -> None:
    """And the recording of it gives the same decisions, or those of another NodeSLO."""
    recording = tmp_path / "recording"
    config = {"recording": {"enabled": True, "directory": str(recording)}}
    with (
        running_pod(bed, pod("batch", "BE", command=_SPIN)),
        untouched_afterwards(bed),
        daemon(bed, [node(), suppressing("cfsQuota")], config=config) as koordlet,
        seen(bed, koordlet) as found,
    ):
        wait(lambda: used_by_ls(koordlet) == 0.0, "an idle node is measured")
        with running_pod(bed, service()):
            wait(lambda: used_by_ls(koordlet) > 0.3, "the load is seen")
            most = (len(CPUS) * 0.95 - 0.3) * 100_000
            wait(lambda: 0 < quota(bed) <= most, "best-effort pods have less than the rest")
            before = throttled(bed)
            wait(lambda: throttled(bed) > before, "the quota holds the spinner")
            shown = strategy(koordlet, "BECPUSuppress")
            assert shown["claims"] and not shown["problem"], shown
            assert "node 95 % x" in shown["summary"]
        wait(lambda: released(bed, koordlet), "best-effort pods have all that is left again")
        koordlet.put(suppressing("cfsQuota", enable=False))
        wait(lambda: quota(bed) == -1, "the original quota is back")
    decided = suppressions(recording)
    assert is_in_order(found.quotas, [-1, *map(quota_claimed, decided)]), found.quotas
    assert len(found.summaries) > 3
    assert is_in_order(found.summaries, ["", *(each.summary for each in decided)]), found.summaries
    other = tmp_path / "other.yaml"
    other.write_text(yaml.safe_dump(suppressing("cfsQuota", cpuSuppressThresholdPercent=60)))
    done = koordlet.koordctl("replay", str(recording), "--nodeslo", str(other), "-o", "json")
    answer = json.loads(done.stdout)
    assert answer["rounds"] == len(decided) and not answer["damagedFrames"]
    assert any("node 60 % x" in each["other"]["summary"] for each in answer["differences"])


def test_a_pod_with_cpus_of_its_own_drives_best_effort_pods_off_them(bed: Containerd) -> None:
    owner = pinned_pod("owner", FIRST)
    owner["metadata"]["labels"]["koordinator.sh/qosClass"] = "LSE"
    with (
        running_pod(bed, pod("batch", "BE", command=_SPIN)) as batch,
        untouched_afterwards(bed),
        daemon(bed, [node(), suppressing("cpuset")]) as koordlet,
    ):
        wait(lambda: strategy(koordlet, "BECPUSuppress")["claims"], "suppression began")
        with running_pod(bed, owner):
            wait(lambda: cpus_of(bed, batch) == {_REST}, f"the spinner runs on {_REST} alone")
            # The directory's set is written after those of the groups in it.
            wait(lambda: besteffort(bed, "cpuset.cpus") == _REST, "the directory's set follows")
            assert pod_value(bed, batch, "cpuset.cpus") == _REST
            with running_pod(bed, pod("late", "BE", command=_SPIN)) as late:
                wait(lambda: cpus_of(bed, late) == {_REST}, "a new pod is held too")
        wait(lambda: cpus_of(bed, batch) != {_REST}, "the CPU is free again")
        koordlet.put(suppressing("cpuset", enable=False))
        wait(lambda: besteffort(bed, "cpuset.cpus") != _REST, "the original set is back")


@pytest.mark.parametrize("policy", ["cfsQuota", "cpuset"])
def test_restore_gives_back_what_a_killed_daemon_left(bed: Containerd, policy: str) -> None:
    owner = pinned_pod("owner", FIRST)
    owner["metadata"]["labels"]["koordinator.sh/qosClass"] = "LSE"
    with (
        running_pod(bed, pod("batch", "BE", command=_SPIN)) as batch,
        running_pod(bed, owner),
        untouched_afterwards(bed),
        daemon(bed, [node(), suppressing(policy)]) as koordlet,
    ):
        wait(lambda: cpus_of(bed, batch) == {_REST}, "the spinner leaves the CPU")
        if policy == "cfsQuota":
            wait(lambda: quota(bed) > 0, "a quota is in force")
        koordlet.stop(signal.SIGKILL)
        assert cpus_of(bed, batch) == {_REST}
        done = koordlet.run_koordlet("restore")
        assert done.returncode == 0, done.stdout + done.stderr
        # Else the next daemon would claim again what was restored.
        assert not (koordlet.run_dir / "leases").exists()


@contextmanager
def observed(bed: Containerd) -> Iterator[set[int]]:
    """The quotas that best-effort pods had during the block, as a thread reads them."""
    seen: set[int] = set()
    ended = threading.Event()

    def look() -> None:
        while not ended.wait(0.002):
            seen.add(quota(bed))

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield seen
    finally:
        ended.set()
        thread.join()


def test_a_daemon_that_was_killed_releases_what_the_one_before_suppressed(bed: Containerd) -> None:
    with (
        running_pod(bed, pod("batch", "BE", command=_SPIN)),
        untouched_afterwards(bed),
        daemon(bed, [node(), suppressing("cfsQuota")]) as koordlet,
    ):
        with running_pod(bed, service()):
            wait(lambda: used_by_ls(koordlet) > 0.3 and quota(bed) > 0, "suppression began")
            koordlet.stop(signal.SIGKILL)
            assert quota(bed) > 0
            with observed(bed) as quotas:
                koordlet.start()
                wait(lambda: used_by_ls(koordlet) > 0.3, "it measures again")
            assert quotas and min(quotas) > 0, "best-effort pods were released for a moment"
            koordlet.stop(signal.SIGKILL)
        koordlet.put(suppressing("cfsQuota", enable=False))
        koordlet.start()
        wait(lambda: quota(bed) == -1, "the original quota is back")


@contextmanager
def cpus_observed(bed: Containerd, running: RunningPod) -> Iterator[set[str]]:
    """The CPUs that best-effort pods had during the block, as a thread reads them."""
    seen: set[str] = set()
    ended = threading.Event()

    def look() -> None:
        while not ended.wait(0.002):
            seen.add(besteffort(bed, "cpuset.cpus"))
            seen.add(pod_value(bed, running, "cpuset.cpus"))
            seen.update(cpus_of(bed, running))

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield seen
    finally:
        ended.set()
        thread.join()


def test_a_restart_leaves_best_effort_pods_on_their_cpus_and_the_next_one_frees_them(
    bed: Containerd,
) -> None:
    owner = pinned_pod("owner", FIRST)
    owner["metadata"]["labels"]["koordinator.sh/qosClass"] = "LSE"
    with (
        running_pod(bed, pod("batch", "BE")) as batch,
        untouched_afterwards(bed),
        daemon(bed, [node(), suppressing("cpuset")]) as koordlet,
    ):
        with running_pod(bed, owner):
            wait(lambda: cpus_of(bed, batch) == {_REST}, f"it runs on {_REST} alone")
            wait(lambda: besteffort(bed, "cpuset.cpus") == _REST, "the directory's set follows")
            with cpus_observed(bed, batch) as seen:
                koordlet.stop(signal.SIGKILL)
                koordlet.start()
                with running_pod(bed, pod("late", "BE")) as late:
                    wait(lambda: strategy(koordlet, "BECPUSuppress")["steps"] > 2, "it steps")
                    wait(lambda: cpus_of(bed, late) == {_REST}, "a new pod is held too")
            assert seen == {_REST}, "best-effort pods were released, or held elsewhere"
            koordlet.stop(signal.SIGKILL)
        assert cpus_of(bed, batch) == {_REST}
        koordlet.start()
        wait(lambda: cpus_of(bed, batch) != {_REST}, "the owner ended meanwhile: its CPU is free")
        koordlet.put(suppressing("cpuset", enable=False))
        wait(lambda: besteffort(bed, "cpuset.cpus") != _REST, "the original set is back")


def test_a_daemon_that_was_frozen_goes_on_with_new_samples(bed: Containerd) -> None:
    """Frozen for longer than its claims live, as on a machine that was suspended."""
    with (
        running_pod(bed, pod("batch", "BE", command=_SPIN)),
        untouched_afterwards(bed),
        daemon(bed, [node(), suppressing("cfsQuota")]) as koordlet,
    ):
        with running_pod(bed, service()):
            wait(lambda: used_by_ls(koordlet) > 0.3 and quota(bed) > 0, "suppression began")
            steps = strategy(koordlet, "BECPUSuppress")["steps"]
            os.kill(koordlet.pid, signal.SIGSTOP)
        try:
            frozen = quota(bed)
            before = throttled(bed)
            wait(lambda: throttled(bed) > before + 110, "the claims' time to live is over")
            assert quota(bed) == frozen
        finally:
            os.kill(koordlet.pid, signal.SIGCONT)
        wait(lambda: strategy(koordlet, "BECPUSuppress")["steps"] > steps + 2, "it goes on")
        wait(lambda: used_by_ls(koordlet) == 0.0, "the new samples count")
        assert strategy(koordlet, "BECPUSuppress")["failures"] == 0
        koordlet.put(suppressing("cfsQuota", enable=False))
        wait(lambda: quota(bed) == -1, "the original quota is back")


_LIMIT_US = 20_000


def spinner_at_its_limit(name: str) -> Manifest:
    return pod(
        name,
        "LS",
        requests={"cpu": "100m"},
        limits={"cpu": "200m", "memory": "64Mi"},
        command=_SPIN,
    )


def test_a_throttled_container_gets_more_quota_and_gives_it_back(bed: Containerd) -> None:
    def quotas() -> tuple[int, int]:
        return (
            int(container_value(bed, web, "cpu.cfs_quota_us")),
            int(pod_value(bed, web, "cpu.cfs_quota_us")),
        )

    with ExitStack() as stack:
        for number in range(len(CPUS)):
            # Use of best-effort pods does not count in the load of the share pool, and keeps that
            # of other programs on this machine below the threshold.
            batch = pod(f"batch-{number}", "BE", command=_SPIN)
            stack.enter_context(running_pod(bed, batch))
        manifest = spinner_at_its_limit("web")
        web = stack.enter_context(running_pod(bed, manifest))
        stack.enter_context(untouched_afterwards(bed))
        assert quotas() == (_LIMIT_US, _LIMIT_US)
        with daemon(bed, [node(), bursting("auto"), manifest]) as koordlet:
            wait(lambda: min(quotas()) > _LIMIT_US * 1.4, "the quotas are raised, step by step")
            container, of_pod = quotas()
            assert max(container, of_pod) <= _LIMIT_US * 3
            explained = koordlet.koordctl("explain", "container", "default/web/main").stdout
            assert "quota burst: throttled; node idle" in explained, explained
            koordlet.put(bursting("none"))
            wait(lambda: quotas() == (_LIMIT_US, _LIMIT_US), "the limits are back")


def test_without_a_burst_policy_a_throttled_container_is_not_touched(bed: Containerd) -> None:
    manifest = spinner_at_its_limit("web")
    with running_pod(bed, manifest) as web:
        before = settled_values(bed)
        with daemon(bed, [node(), bursting("none"), manifest]) as koordlet:
            wait(lambda: strategy(koordlet, "CPUBurst")["steps"] >= 5, "the strategy made steps")
            wait(lambda: "nr_throttled 0" not in container_value(bed, web, "cpu.stat"), "throttled")
            assert not strategy(koordlet, "CPUBurst")["claims"]
            assert all_values(bed) == before


_HOG = "trap 'exit 7' TERM; x=$(yes | head -c %d); while true; do sleep 0.1; done"


def test_a_dry_run_names_the_victims_in_order_and_touches_none(bed: Containerd) -> None:
    slo = nodeslo()
    slo["spec"]["resourceUsedThresholdWithBE"] = {
        "enable": True,
        "memoryEvictThresholdPercent": 1,
        "memoryEvictLowerPercent": 0,
    }
    config = {
        "cri": {"socket": str(bed.socket)},
        "qos": {"evictDryRun": True, "evictMostPerRound": 2, "memoryEvictCoolDown": "10m"},
    }
    sizes = {"small": 10_000_000, "large": 40_000_000, "middle": 25_000_000}
    hogs = {name: pod(name, "BE", command=["/bin/sh", "-c", _HOG % sizes[name]]) for name in sizes}
    with (
        daemon(bed, [node(), nodeslo()], gates={"BEMemoryEvict": True}, config=config) as koordlet,
        running_pod(bed, hogs["small"]) as small,
        running_pod(bed, hogs["large"]) as large,
        running_pod(bed, hogs["middle"]) as middle,
    ):
        client = Client(str(koordlet.run_dir))

        def measured() -> bool:
            pods = {each["name"]: each["memory"] or 0 for each in client.get("/top")["pods"]}
            return all(pods.get(name, 0) > 0.8 * size for name, size in sizes.items())

        wait(measured, "all three are measured")
        koordlet.put(slo)
        wait(lambda: len(client.get("/status")["evictions"]["last"]) >= 2, "two are named")
        last = client.get("/status")["evictions"]["last"]
        # Two of a round; the cool-down is longer than the test.
        assert [each["pod"] for each in last] == ["Pod default/large", "Pod default/middle"], last
        for running in (small, large, middle):
            assert bed.groups.read(running.container_cgroup("main"), "cgroup.procs").strip()
        assert json.dumps(last).count("BEMemoryEvict") >= 2
