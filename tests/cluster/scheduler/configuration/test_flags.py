"""The command line: kube-scheduler's and Koordinator's flags, and which count beside a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from apis.errors import InputError, InputErrors
from cluster.flags import FlagError
from cluster.scheduler.configuration.auditing import AuditorSettings, MetricLabel
from cluster.scheduler.configuration.configuration import LeaderElection, SchedulerConfiguration
from cluster.scheduler.configuration.flags import FLAGS, help_text, parse
from cluster.scheduler.configuration.loading import load
from cluster.scheduler.configuration.strict import Seconds
from tests.cluster.scheduler.configuration.files import chart_file, file

CHART = (
    "--port=10251",
    "--authentication-skip-lookup=true",
    "--v=4",
    "--feature-gates=MultiQuotaTree=true",
    "--enable-network-topology-manager=true",
)


def configured(tree: dict[str, Any], directory: Path, *flags: str) -> SchedulerConfiguration:
    path = directory / "koord-scheduler.config"
    path.write_text(yaml.safe_dump(tree))
    return load(parse([f"--config={path}", *flags]))


def test_the_charts_command_line() -> None:
    settings = parse(["--config=/config/koord-scheduler.config", *CHART])
    assert settings.text("config") == "/config/koord-scheduler.config"
    assert settings.port("port") == 10251
    assert settings.on("enable-network-topology-manager")
    assert settings.gates.on["MultiQuotaTree"]
    assert settings.controllers == {"Coscheduling", "ElasticQuota", "Reservation"}
    assert settings.without_effect == ()


@pytest.mark.parametrize(
    ("arguments", "flag", "text"),
    [
        (["-v=4"], "v", "4"),
        (["-v", "4"], "v", "4"),
        (["-v4"], "v", "4"),
        (["-s", "20"], "debug-scores", "20"),
        (["-s20"], "debug-scores", "20"),
        (["-f"], "debug-filters", "true"),
        (["-d=false"], "debug-diagnosis", "false"),
        (["-db"], "debug-diagnosis-blocking", "true"),
        (["--controller-plugins=*", "--controller-plugins", "-ElasticQuota"], "port", "10251"),
    ],
)
def test_flags_are_written_as_upstreams(arguments: list[str], flag: str, text: str) -> None:
    assert parse(arguments).text(flag) == text


def test_lists_may_be_repeated() -> None:
    settings = parse(
        [
            "--feature-gates=kube:SyncBarrier=true,AllBeta=false",
            "--feature-gates=WatchList=true",
            "--controller-plugins=-ElasticQuota",
            "--controller-plugins=*",
        ]
    )
    assert settings.gates.on["SyncBarrier"]
    assert not settings.gates.on["GangPendingPodsConditionPatch"]
    assert settings.controllers == {"Coscheduling", "Reservation"}
    ours, others = load(settings).notices
    assert ours.startswith("feature gates that have no effect here: ")
    assert "SyncBarrier=true" in ours
    assert others.endswith("no effect here: WatchList")


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--confg=x"], "did you mean -config"),
        (["--port=70000"], "--port=70000: expected a port number"),
        (["--debug-scores=many"], "--debug-scores=many: expected a whole number"),
        (["--kube-api-burst=-1"], "expected a whole number, 0 to 2"),
        (["--kube-api-qps=fast"], "--kube-api-qps=fast: expected a number"),
        (["--workload-auditor-metric-labels=team=t,team=u"], "have a label team already"),
        (["--workload-auditor-metric-labels=priority=t"], "have a label priority already"),
        (["--workload-auditor-metric-labels=le=t"], "have a label le already"),
        (["--workload-auditor-metric-labels=a-b=t"], "'a-b' is no name of a label"),
        (["--workload-auditor-metric-labels=__a=t"], "'__a' is no name of a label"),
        (["--workload-auditor-victim-deleting-retries=-1"], "expected a whole number"),
        (["--sync-hard-timeout=1"], "--sync-hard-timeout=1: not a duration"),
        (["--leader-elect=maybe"], "-leader-elect = 'maybe': not a boolean"),
        (["--controller-plugins=Gang"], "'Gang' is unknown; expected"),
        (["--feature-gates=SyncBarier=true"], "unknown feature gate .did you mean SyncBarrier"),
        (["--feature-gates=SyncBarrier"], "not a feature gate and its setting"),
        (["config.yaml"], "'config.yaml' is not a flag"),
        (["--config"], "needs a value"),
    ],
)
def test_bad_flags_are_named(arguments: list[str], problem: str) -> None:
    with pytest.raises(FlagError, match=problem):
        parse(arguments)


def test_flags_of_the_workload_auditor() -> None:
    assert parse([]).auditor is None
    assert parse(["--enable-workload-auditor"]).auditor == AuditorSettings()
    labels = " quota_name = quota.scheduling.koordinator.sh/name,gpu=, =x,nothing,,a=b=c"
    settings = parse(
        [
            "--enable-workload-auditor=true",
            f"--workload-auditor-metric-labels={labels}",
            "--workload-auditor-victim-reschedule-duration=1m",
            "--workload-auditor-victim-deletion-duration=500ms",
            "--workload-auditor-victim-deleting-retries=0",
            "--workload-auditor-scheduling-event-interval=1h",
        ]
    )
    assert settings.auditor == AuditorSettings(
        (
            MetricLabel("quota_name", "quota.scheduling.koordinator.sh/name"),
            MetricLabel("a", "b=c"),
        ),
        victim_reschedule_s=60.0,
        victim_deletion_s=0.5,
        victim_deleting_retries=0,
        event_interval_s=3600.0,
    )
    assert settings.without_effect == ()


def test_help_names_every_flag() -> None:
    text = help_text()
    assert all(f"--{name}" in text for name in FLAGS)


def test_without_a_file_the_clients_flags_count() -> None:
    found = load(parse(["--kubeconfig=/k", "--kube-api-qps=5", "--kube-api-burst=9"]))
    client = found.client_connection
    assert (client.kubeconfig, client.qps, client.burst) == ("/k", 5.0, 9)
    assert [profile.scheduler_name for profile in found.profiles] == ["default-scheduler"]
    assert found.notices == ()


def test_beside_a_file_the_clients_flags_are_named_as_without_effect(tmp_path: Path) -> None:
    tree = file(clientConnection={"kubeconfig": "/file", "qps": 7})
    found = configured(tree, tmp_path, "--kubeconfig=/k", "--kube-api-qps=5")
    assert (found.client_connection.kubeconfig, found.client_connection.qps) == ("/file", 7)
    assert [notice.split()[0] for notice in found.notices] == ["--kubeconfig", "--kube-api-qps"]


def test_flags_of_leader_election_override_the_file(tmp_path: Path) -> None:
    flags = (
        "--leader-elect-resource-name=mine",
        "--leader-elect-lease-duration=30s",
        "--leader-elect-retry-period=3s",
    )
    lease = configured(chart_file(), tmp_path, *flags).leader_election
    assert (lease.resource_name, lease.resource_namespace) == ("mine", "koordinator-system")
    assert lease.lease_duration == Seconds(30)
    assert lease.renew_deadline == Seconds(10)
    assert lease.retry_period == Seconds(3)
    alone = configured(chart_file(), tmp_path, "--leader-elect=false").leader_election
    assert not alone.leader_elect
    assert configured(chart_file(), tmp_path).leader_election.resource_name == "koord-scheduler"


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (["--leader-elect-lease-duration=5s"], "-leader-elect-lease-duration = '5s': must be"),
        (["--leader-elect-retry-period=9s"], "-leader-elect-renew-deadline = '10s': must be"),
        (["--leader-elect-retry-period=0s"], "-leader-elect-retry-period = '0s': must be greater"),
        (["--leader-elect-resource-lock=endpoints"], "expected leases"),
    ],
)
def test_bad_flags_of_leader_election_are_named(flags: list[str], problem: str) -> None:
    with pytest.raises(InputError, match=problem):
        load(parse(flags))


def test_a_lease_is_not_checked_without_an_election() -> None:
    flags = ["--leader-elect=false", "--leader-elect-lease-duration=5s"]
    assert load(parse(flags)).leader_election.lease_duration == Seconds(5)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"cannot be read: .*No such file"):
        load(parse([f"--config={tmp_path}/absent"]))
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(InputError, match=r"cannot be read: .*decode"):
        load(parse([f"--config={tmp_path}/binary"]))
    (tmp_path / "large").write_bytes(b"#" * (1 << 21))
    with pytest.raises(InputErrors, match="longer than 1048576"):
        load(parse([f"--config={tmp_path}/large"]))


_UPSTREAMS_DEFAULTS = """
    --pod-max-in-unschedulable-pods-duration=5m --kube-api-qps=50 --kube-api-burst=100
    --leader-elect=true --leader-elect-lease-duration=15s --leader-elect-renew-deadline=10s
    --leader-elect-retry-period=2s --leader-elect-resource-lock=leases
    --leader-elect-resource-name=kube-scheduler --leader-elect-resource-namespace=kube-system
    --config= --feature-gates= --kubeconfig= --master= --port=10251 --address=0.0.0.0
    --secure-port=10259 --bind-address=0.0.0.0 --tls-cert-file= --tls-private-key-file=
    --tls-min-version= --client-ca-file= --authentication-skip-lookup=false
    --authentication-tolerate-lookup-failure=true --authentication-kubeconfig=
    --authentication-token-webhook-cache-ttl=10s --authorization-kubeconfig=
    --authorization-always-allow-paths=/healthz,/readyz,/livez
    --authorization-webhook-cache-authorized-ttl=10s
    --authorization-webhook-cache-unauthorized-ttl=10s --v=0 --controller-plugins=*
    --enable-network-topology-manager=false --enable-workload-auditor=false
    --workload-auditor-metric-labels= --workload-auditor-victim-reschedule-duration=10s
    --workload-auditor-victim-deletion-duration=30s --workload-auditor-victim-deleting-retries=3
    --workload-auditor-scheduling-event-interval=5m
"""
_ACCEPTED_WITHOUT_EFFECT = """
    --sync-barrier-pod-namespace=kube-system --sync-barrier-pod-name=koord-scheduler-sync-barrier
    --sync-hard-timeout=1m --debug-scores=0 --debug-filters=false --debug-diagnosis=false
    --scheduler-monitor-period=10s --scheduling-timeout=30s --scheduling-drop-unhandled-timeout=5s
    --debug-diagnosis-blocking=false --debug-diagnosis-queue-size=1000
    --debug-diagnosis-worker-count=10 --async-log=false --async-log-queue-length=10000
    --kube-api-content-type=application/vnd.kubernetes.protobuf --profiling=true
    --contention-profiling=true --emulated-version= --min-compatibility-version= --cert-dir=
    --tls-cipher-suites= --tls-curve-preferences= --tls-sni-cert-key=
    --disable-http2-serving=false --http2-max-streams-per-connection=0
    --permit-address-sharing=false --permit-port-sharing=false --requestheader-allowed-names=
    --requestheader-client-ca-file= --requestheader-extra-headers-prefix=x-remote-extra-
    --requestheader-group-headers=x-remote-group --requestheader-uid-headers=
    --requestheader-username-headers=x-remote-user --allow-metric-labels=
    --allow-metric-labels-manifest= --disabled-metrics= --show-hidden-metrics-for-version=
    --log-flush-frequency=5s --log-json-info-buffer-size=0 --log-json-split-stream=false
    --log-text-info-buffer-size=0 --log-text-split-stream=false --logging-format=text --vmodule=
"""


def test_a_manifest_that_spells_out_upstreams_defaults_says_nothing_new() -> None:
    counts, idle = _UPSTREAMS_DEFAULTS.split(), _ACCEPTED_WITHOUT_EFFECT.split()
    settings, silent = parse([*counts, *idle]), parse([])
    assert settings.values == silent.values
    assert {each.removeprefix("--").partition("=")[0] for each in counts + idle} == FLAGS.keys()
    without_effect = {each.removeprefix("--").partition("=")[0] for each in idle}
    assert {each.lstrip("-").partition("=")[0] for each in settings.without_effect} == (
        without_effect
    )
    assert (settings.gates, settings.controllers, settings.auditor) == (
        silent.gates, silent.controllers, None
    )  # fmt: skip


_ON = """DynamicSchedulerCheck CSIStorageCapacity GenericEphemeralVolume PodDisruptionBudget
GangPendingPodsConditionPatch EnableBatchScheduleNodeSnapshot"""
_OFF = """CompatibleCSIStorageCapacity DisableCSIStorageCapacityInformer
CompatiblePodDisruptionBudget DisablePodDisruptionBudgetInformer
DisableDynamicResourceAllocationInformer ResizePod MultiQuotaTree ElasticQuotaIgnorePodOverhead
ElasticQuotaIgnoreTerminatingPod ElasticQuotaImmediateIgnoreTerminatingPod
ElasticQuotaGuaranteeUsage DisableDefaultQuota SupportParentQuotaSubmitPod LazyReservationRestore
OmitNodeLabelsForReservation SkipReservationFitsNode DevicePluginAdaption
CleanExpiredReservationAllocated SkipFilterWithNominatedPods SyncBarrier
CrossSchedulerNomination EnableInlineBatchSchedule PriorityTransformer
PreemptionPolicyTransformer ReplaceResourcesTransformer"""
_IDLE = """CompatibleCSIStorageCapacity DisableCSIStorageCapacityInformer
CompatiblePodDisruptionBudget DisablePodDisruptionBudgetInformer
DisableDynamicResourceAllocationInformer SupportParentQuotaSubmitPod LazyReservationRestore
SkipReservationFitsNode SkipFilterWithNominatedPods SyncBarrier EnableInlineBatchSchedule"""


def test_upstreams_gates_have_its_defaults_and_those_without_effect_are_named() -> None:
    on, off, idle = _ON.split(), _OFF.split(), _IDLE.split()
    assert dict(parse([]).gates.on) == {name: name in on for name in (*on, *off)}
    text = ",".join(f"{name}={str(name in off).lower()}" for name in (*on, *off))
    found = load(parse([f"--feature-gates={text}"]))
    assert found.gates == {name: name in off for name in (*on, *off)}
    (notice,) = found.notices
    what, _, named = notice.partition(": ")
    assert what == "feature gates that have no effect here"
    expected = {*(f"{name}=true" for name in idle), *(f"{name}=false" for name in on)}
    assert set(named.split(", ")) == expected


def test_gates_of_other_components_are_named() -> None:
    found = load(parse(["--feature-gates=kube:ResizePod=true,SomethingElse=true"]))
    assert found.gates["ResizePod"]
    assert found.notices == (
        "feature gates of other components, which have no effect here: SomethingElse",
    )


@pytest.mark.parametrize("flag", ["kubeconfig", "kube-api-qps", "kube-api-burst"])
def test_each_flag_of_the_client_is_named_beside_a_file(tmp_path: Path, flag: str) -> None:
    found = configured(file(), tmp_path, f"--{flag}=7")
    assert found.notices == (
        f"--{flag} has no effect: --config is given, and its clientConnection counts",
    )


def test_zeros_of_the_clients_flags_are_its_defaults() -> None:
    client = load(parse(["--kube-api-qps=0", "--kube-api-burst=0"])).client_connection
    assert (client.qps, client.burst) == (50.0, 100)


def test_every_flag_of_leader_election_overrides_its_field(tmp_path: Path) -> None:
    flags = {
        "leader-elect": "true",
        "leader-elect-lease-duration": "33s",
        "leader-elect-renew-deadline": "22s",
        "leader-elect-retry-period": "11s",
        "leader-elect-resource-lock": "leases",
        "leader-elect-resource-name": "name",
        "leader-elect-resource-namespace": "namespace",
    }
    tree = file(leaderElection={"leaderElect": False})
    given = [f"--{name}={text}" for name, text in flags.items()]
    assert configured(tree, tmp_path, *given).leader_election == LeaderElection(
        leader_elect=True,
        lease_duration=Seconds(33),
        renew_deadline=Seconds(22),
        retry_period=Seconds(11),
        resource_lock="leases",
        resource_name="name",
        resource_namespace="namespace",
    )
    # An empty text is the default, not that of the file.
    tree = file(leaderElection={"resourceName": "other"})
    lease = configured(tree, tmp_path, "--leader-elect-resource-name=").leader_election
    assert lease.resource_name == "kube-scheduler"
