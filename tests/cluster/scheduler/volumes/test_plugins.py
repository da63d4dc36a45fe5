"""What the plugins about volumes decide, case by case, with kube-scheduler's messages."""

from __future__ import annotations

from typing import Any

import pytest

from apis.core import ObjectMeta
from apis.storage import (
    ANNOTATION_MIGRATED_PLUGINS,
    CSINode,
    CSINodeDriver,
    CSINodeSpec,
    VolumeNodeResources,
)
from cluster.scheduler.cycle.scheduling import Placed, Unplaced
from cluster.scheduler.plugins.contract import Reason, Refusal
from cluster.scheduler.plugins.volumes.binding import VolumeBinding
from cluster.scheduler.plugins.volumes.restrictions import VolumeRestrictions
from cluster.scheduler.plugins.volumes.zone import VolumeZone
from cluster.scheduler.sources.bookings import booking_of
from cluster.scheduler.tables.booking import Allocation
from cluster.scheduler.tables.volumes.attachments import limits_of
from tests.cluster.scheduler.making import make_pod
from tests.cluster.scheduler.volumes.making import HOST, ZONE, Cluster, on, pod_with

_NO_VOLUME = "node(s) didn't find available persistent volumes to bind"
_NOT_REACHED = "node(s) didn't match PersistentVolume's node affinity"
_NO_STORAGE = "node(s) did not have enough free storage"
_IN_USE = (
    "node(s) unavailable due to PersistentVolumeClaim with ReadWriteOncePod access mode already "
    "in-use by another pod"
)


def _cluster() -> Cluster:
    """Return three nodes, n2 in zone b and the others in a, with two classes that wait."""
    cluster = Cluster()
    for name, zone in (("n0", "a"), ("n1", "a"), ("n2", "b")):
        cluster.node(name, zone=zone)
    cluster.storage_class("wait")
    cluster.storage_class("made", provisioner="csi.test")
    cluster.storage_class("now", mode="Immediate")
    return cluster


def _message(outcome: Placed | Unplaced) -> str:
    assert isinstance(outcome, Unplaced)
    return outcome.diagnosis.message


# --- claims that cannot be used ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("claim", "message"),
    [
        (None, 'persistentvolumeclaim "c" not found'),
        ({"metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z"}}, "is being deleted"),
        ({"class_name": "now"}, "pod has unbound immediate PersistentVolumeClaims"),
        ({"class_name": None}, "pod has unbound immediate PersistentVolumeClaims"),
        ({"class_name": "unknown"}, "pod has unbound immediate PersistentVolumeClaims"),
        # The user chose a volume; the controller binds such a claim without a pod.
        ({"volumeName": "v"}, "pod has unbound immediate PersistentVolumeClaims"),
        ({"volume": "gone"}, 'persistentvolume "gone" not found'),
        (
            {"volume": "v", "phase": "Lost"},
            'persistentvolumeclaim "c" bound to non-existent persistentvolume "v"',
        ),
    ],
)
def test_a_claim_that_cannot_be_used_refuses_the_pod(
    claim: dict[str, Any] | None, message: str
) -> None:
    cluster = _cluster()
    if claim is not None:
        cluster.claim("c", **claim)
    outcome = cluster.place(pod_with("p", "c"))
    assert message in _message(outcome)
    assert isinstance(outcome, Unplaced)
    assert not len(outcome.diagnosis.resolvable)


def test_an_ephemeral_volume_waits_for_its_claim_which_the_pod_has_to_own() -> None:
    cluster = _cluster()
    pod = make_pod("p", volumes=[{"name": "data", "ephemeral": {}}])
    assert (
        'waiting for ephemeral volume controller to create the persistentvolumeclaim "p-data"'
        in cluster.node_of(pod)
    )
    owner = {"kind": "Pod", "name": "p", "uid": "another", "controller": True}
    cluster.claim("p-data", class_name="made", metadata={"ownerReferences": [owner]})
    assert "PVC default/p-data was not created for pod default/p (pod is not owner)" in (
        cluster.node_of(pod)
    )
    owner["uid"] = pod.metadata.uid
    cluster.claim("p-data", class_name="made", metadata={"ownerReferences": [owner]})
    assert cluster.node_of(pod).startswith("n")


def test_pods_without_volumes_are_not_looked_at() -> None:
    cluster = _cluster()
    shape = cluster.shapes.of(make_pod("p"))
    evaluation = cluster.evaluator.evaluate(shape)
    assert evaluation.masks == ()


# --- bound claims --------------------------------------------------------------------------------


def test_a_bound_volume_is_reached_from_some_nodes_only() -> None:
    cluster = _cluster()
    cluster.volume("v", claim="c", terms=on(HOST, "n1"))
    cluster.claim("c", volume="v")
    assert cluster.feasible(pod_with("p", "c")) == {"n1"}
    cluster.volume("v", claim="c", terms=on(HOST, "nowhere"))
    assert cluster.node_of(pod_with("p", "c")) == f"0/3 nodes are available: 3 {_NOT_REACHED}."


def test_a_place_may_be_any_node_selector() -> None:
    cluster = _cluster()
    cluster.node("n3", zone="b", labels={"rank": "7"})
    greater = {"key": "rank", "operator": "Gt", "values": ["5"]}
    two = [
        *on(HOST, "n0"),
        {"matchExpressions": [greater, on(ZONE, "b")[0]["matchExpressions"][0]]},
    ]
    cluster.volume("v", claim="c", terms=two)
    cluster.claim("c", volume="v")
    assert cluster.feasible(pod_with("p", "c")) == {"n0", "n3"}
    cluster.node("n3", zone="a", labels={"rank": "7"})
    assert cluster.feasible(pod_with("p", "c")) == {"n0"}


def test_zones_of_a_volume_hold_for_nodes_with_zones() -> None:
    cluster = _cluster()
    cluster.node("bare")
    old = "failure-domain.beta.kubernetes.io/zone"
    cluster.node("old", labels={old: "c"})
    cluster.volume("v", claim="c", labels={ZONE: "b__c"})
    cluster.claim("c", volume="v")
    assert cluster.feasible(pod_with("p", "c")) == {"n2", "bare"}
    # An old label of the volume is compared with the node's present one where it lacks the old.
    cluster.volume("v", claim="c", labels={old: "b__c"})
    assert cluster.feasible(pod_with("p", "c")) == {"n2", "bare", "old"}
    cluster.volume("v", claim="c", labels={ZONE: "b__"})
    assert cluster.feasible(pod_with("p", "c")) == {"n0", "n1", "n2", "bare", "old"}


@pytest.mark.parametrize(
    ("claim", "message"),
    [
        (None, 'persistentvolumeclaim "c" not found'),
        ({"volume": "gone"}, 'persistentvolume "gone" not found'),
        ({"class_name": None}, "PersistentVolumeClaim had no pv name and storageClass name"),
        ({"class_name": "unknown"}, 'storageclass.storage.k8s.io "unknown" not found'),
        ({"class_name": "now"}, "PersistentVolume had no name"),
        ({"class_name": "wait"}, ""),
        ({"volume": "v"}, ""),
    ],
)
def test_zones_are_looked_at_without_the_other_plugins_too(
    claim: dict[str, Any] | None, message: str
) -> None:
    cluster = _cluster()
    cluster.volume("v", claim="c")
    if claim is not None:
        cluster.claim("c", **claim)
    pod = cluster.shapes.of(pod_with("p", "c"))
    if not message:
        assert not VolumeZone().applies(pod, cluster.tables)
        return
    with pytest.raises(Refusal) as raised:
        VolumeZone().applies(pod, cluster.tables)
    assert (raised.value.plugin, str(raised.value)) == ("VolumeZone", message)


def test_zones_of_ephemeral_volumes_are_not_looked_at() -> None:
    cluster = _cluster()
    cluster.volume("mine", labels={ZONE: "a"}, claim="p-data")
    cluster.claim("p-data", volume="mine")
    cluster.volume("v", labels={ZONE: "b"}, claim="c")
    cluster.claim("c", volume="v")
    ephemeral = {"name": "data", "ephemeral": {}}
    alone, beside = (
        cluster.shapes.of(make_pod("p", volumes=[ephemeral, *others]))
        for others in ([], [{"name": "v", "persistentVolumeClaim": {"claimName": "c"}}])
    )
    assert not VolumeZone().applies(alone, cluster.tables)
    assert VolumeZone().applies(beside, cluster.tables)
    assert VolumeZone().filter(beside, cluster.tables, slice(0, 3)).tolist() == [1, 1, 0]


# --- claims that wait for their pod --------------------------------------------------------------


def _planned(outcome: Placed | Unplaced) -> tuple[str, dict[str, str], tuple[str, ...]]:
    assert isinstance(outcome, Placed)
    volumes = outcome.booking.allocation.volumes
    return outcome.booking.node, dict(volumes.binds), volumes.provisions


def test_the_smallest_volume_that_fits_is_taken_and_held() -> None:
    cluster = _cluster()
    for name, size in (("large", "9Gi"), ("mid", "5Gi"), ("small", "1Gi")):
        cluster.volume(name, size=size, terms=on(HOST, "n0"))
    cluster.volume("other", size="5Gi", class_name="made", terms=on(HOST, "n1"))
    for number in range(3):
        cluster.claim(f"c{number}", size="2Gi")
    assert _planned(cluster.place(pod_with("p0", "c0")))[1] == {"default/c0": "mid"}
    assert _planned(cluster.place(pod_with("p1", "c1")))[1] == {"default/c1": "large"}
    assert cluster.node_of(pod_with("p2", "c2")) == f"0/3 nodes are available: 3 {_NO_VOLUME}."
    cluster.tables.remove("uid-default-p0")
    assert _planned(cluster.place(pod_with("p2", "c2")))[1] == {"default/c2": "mid"}


@pytest.mark.parametrize(
    "fields",
    [
        {"size": "1Gi"},
        {"modes": ("ReadOnlyMany",)},
        {"volumeMode": "Block"},
        {"labels": {"tier": "silver"}},
        {"class_name": "made"},
        {"claim": "other"},
        {"terms": on(HOST, "nowhere")},
        {"terms": []},
    ],
)
def test_a_volume_must_fit_its_claim(fields: dict[str, Any]) -> None:
    cluster = _cluster()
    selector = {"matchLabels": {"tier": "gold"}}
    cluster.claim("c", size="2Gi", selector=selector)
    fitting: dict[str, Any] = {"size": "2Gi", "labels": {"tier": "gold"}}
    cluster.volume("v", **(fitting | fields))
    assert _NO_VOLUME in cluster.node_of(pod_with("p", "c"))
    cluster.tables.volumes.delete_volume("v")
    cluster.volume("v", **fitting)
    assert _planned(cluster.place(pod_with("p", "c")))[1] == {"default/c": "v"}


def test_claims_of_one_pod_get_volumes_that_one_node_reaches() -> None:
    cluster = _cluster()
    cluster.volume("a0", size="1Gi", terms=on(HOST, "n0"))
    cluster.volume("a1", size="2Gi", terms=on(HOST, "n1"))
    cluster.volume("b1", size="3Gi", terms=on(HOST, "n1"))
    cluster.volume("zone", size="4Gi", terms=on(ZONE, "b"))
    cluster.claim("x", size="2Gi")
    cluster.claim("y", size="1Gi")
    node, binds, _ = _planned(cluster.place(pod_with("p", "x", "y")))
    assert (node, binds) == ("n1", {"default/y": "a1", "default/x": "b1"})


def test_a_volume_that_refers_to_the_claim_is_the_only_choice() -> None:
    cluster = _cluster()
    cluster.volume("small", size="1Gi", terms=on(HOST, "n0"))
    cluster.volume("mine", size="9Gi", claim="c", terms=on(HOST, "n2"))
    cluster.claim("c")
    assert _planned(cluster.place(pod_with("p", "c"))) == ("n2", {"default/c": "mine"}, ())


def test_pods_that_share_a_claim_share_its_volume() -> None:
    cluster = _cluster()
    cluster.volume("one", size="1Gi", terms=on(ZONE, "a"))
    cluster.volume("two", size="1Gi", terms=on(HOST, "n2"))
    cluster.claim("c")
    first = _planned(cluster.place(pod_with("p0", "c")))
    second = _planned(cluster.place(pod_with("p1", "c")))
    assert first[1] == second[1]
    cluster.tables.remove("uid-default-p0")
    cluster.claim("d")
    # The second pod still holds the volume of both.
    third = _planned(cluster.place(pod_with("p2", "d")))
    assert third[1]["default/d"] != second[1]["default/c"]


def test_a_volume_is_made_where_the_class_allows_it() -> None:
    cluster = _cluster()
    expression = {"key": ZONE, "values": ["b", "c"]}
    topologies = [{"matchLabelExpressions": [expression]}]
    cluster.storage_class("made", provisioner="csi.test", topologies=topologies)
    cluster.claim("c", class_name="made")
    assert _planned(cluster.place(pod_with("p", "c"))) == ("n2", {}, ("default/c",))
    # A pod that shares the claim goes where its volume is made.
    assert cluster.feasible(pod_with("q", "c")) == {"n2"}


def test_a_volume_that_is_made_for_a_claim_leaves_the_free_ones_in_order() -> None:
    cluster = _cluster()
    volumes = cluster.tables.volumes
    cluster.volume("free", class_name="made", terms=on(HOST, "n0"))
    cluster.volume("old", class_name="made", claim="before")
    known = volumes.candidates("made")
    assert [each.name for each in known.volumes] == ["free"]
    cluster.volume("new", class_name="made", claim="c")
    cluster.volume("new", class_name="made", claim="c", labels={"seen": "again"})
    volumes.delete_volume("old")
    volumes.delete_volume("new")
    assert volumes.candidates("made") is known


def test_a_volume_is_free_after_its_claim_and_until_it_is_taken() -> None:
    cluster = _cluster()
    cluster.claim("c")
    cluster.claim("d")
    cluster.volume("v", claim="before", terms=on(HOST, "n1"))
    assert cluster.feasible(pod_with("p", "c")) == set()
    cluster.volume("v", terms=on(HOST, "n1"))
    placed = pod_with("p", "c")
    assert cluster.node_of(placed) == "n1"
    # It is planned for the first claim while others come, and free again afterwards.
    cluster.volume("w", claim="before", terms=on(HOST, "n2"))
    cluster.volume("x", size="1Mi", terms=on(HOST, "n2"))
    assert cluster.feasible(pod_with("q", "d")) == set()
    cluster.tables.remove(placed.metadata.uid)
    assert cluster.feasible(pod_with("q", "d")) == {"n1"}
    cluster.tables.volumes.delete_volume("v")
    assert cluster.feasible(pod_with("q", "d")) == set()


def test_a_claim_stays_on_the_node_that_it_was_given() -> None:
    cluster = _cluster()
    selected = {"volume.kubernetes.io/selected-node": "n1"}
    cluster.claim("c", class_name="made", annotations=selected)
    cluster.volume("v", class_name="made", terms=on(HOST, "n0"))
    assert _planned(cluster.place(pod_with("p", "c"))) == ("n1", {}, ("default/c",))
    cluster.tables.delete_node("n1")
    assert cluster.node_of(pod_with("q", "c")) == f"0/2 nodes are available: 2 {_NO_VOLUME}."


def test_a_node_that_lost_its_room_for_a_claim_says_why_when_volumes_are_chosen() -> None:
    cluster = _cluster()
    cluster.claim("made", class_name="made", size="5Gi")
    cluster.claim("free")
    chosen = {"volume.kubernetes.io/selected-node": "n1"}
    cluster.claim("given", class_name="made", annotations=chosen)
    cluster.capacity("r", "made", "4Gi", {HOST: "n0"})
    cluster.tables.volumes.set_driver("csi.test", reports_storage=True)

    def refused(claims: str, row: int) -> str:
        pod = cluster.shapes.of(pod_with("p", *claims.split()))
        outcome = VolumeBinding().allocate(pod, cluster.tables, row, Allocation())
        return outcome.text if isinstance(outcome, Reason) else ""

    assert refused("made", 0) == _NO_STORAGE
    assert refused("free", 0) == _NO_VOLUME
    assert refused("given", 0) == refused("made given", 0) == _NO_VOLUME
    assert refused("given", 1) == _NO_STORAGE
    cluster.capacity("r", "made", "5Gi", {HOST: "n0"})
    cluster.volume("v", terms=on(HOST, "n0"))
    assert [refused("made", 0), refused("free", 0), refused("free", 1)] == ["", "", _NO_VOLUME]


def test_a_claim_whose_volume_is_gone_holds_back_the_nodes_that_no_other_does() -> None:
    cluster = _cluster()
    for name, node in (("near", "n1"), ("gone", "n0")):
        cluster.volume(name, claim=name, terms=on(HOST, node))
        cluster.claim(name, volume=name)
    pod = cluster.shapes.of(pod_with("p", "near", "gone"))
    cluster.tables.volumes.delete_volume("gone")
    plugin = VolumeBinding()
    mask = plugin.filter(pod, cluster.tables, slice(0, 3))
    texts = [plugin.reasons(pod)[int(bits).bit_length() - 1].text for bits in mask]
    lost = "node(s) unavailable due to one or more pvc(s) bound to non-existent pv(s)"
    assert texts == [_NOT_REACHED, lost, _NOT_REACHED]


def test_a_driver_that_reports_its_storage_has_to_have_enough() -> None:
    cluster = _cluster()
    cluster.claim("c", class_name="made", size="5Gi")
    cluster.capacity("r0", "made", "4Gi", {HOST: "n0"})
    cluster.capacity("r1", "made", "6Gi", {HOST: "n1"})
    cluster.capacity("r2", "made", "9Gi", {ZONE: "b"}, maximumVolumeSize="4Gi")
    cluster.capacity("r3", "wait", "9Gi", {HOST: "n0"})
    assert cluster.feasible(pod_with("p", "c")) == {"n0", "n1", "n2"}
    cluster.tables.volumes.set_driver("csi.test", reports_storage=True)
    assert cluster.feasible(pod_with("p", "c")) == {"n1"}
    cluster.capacity("more", "made", "7Gi", {HOST: "n0"})
    assert cluster.feasible(pod_with("p", "c")) == {"n0", "n1"}
    for name in ("r1", "more"):
        cluster.tables.volumes.delete_storage(name)
    assert cluster.node_of(pod_with("p", "c")) == f"0/3 nodes are available: 3 {_NO_STORAGE}."


def test_what_changes_no_verdict_leaves_the_version() -> None:
    cluster = _cluster()
    volumes = cluster.tables.volumes
    volumes.set_driver("csi.test", reports_storage=True)
    for name, size in (("c", "5Gi"), ("d", "7Gi")):
        cluster.claim(name, class_name="made", size=size)
    cluster.capacity("r0", "made", "9Gi", {HOST: "n0"})
    cluster.capacity("r1", "made", "6Gi", {HOST: "n1"})

    def verdicts() -> tuple[set[str], set[str]]:
        return cluster.feasible(pod_with("p", "c")), cluster.feasible(pod_with("q", "d"))

    assert verdicts() == ({"n0", "n1"}, {"n0"})
    known = volumes.version
    volumes.set_driver("csi.test", reports_storage=True)
    cluster.storage_class("made", provisioner="csi.test")
    for left in ("8Gi", "7Gi", "99Gi"):
        cluster.capacity("r0", "made", left, {HOST: "n0"})
    cluster.capacity("r1", "made", "5Gi", {HOST: "n1"})
    assert volumes.version == known
    assert verdicts() == ({"n0", "n1"}, {"n0"})
    for left, expected in (
        ("7167Mi", ({"n0", "n1"}, {"n0"})),
        ("7Gi", ({"n0", "n1"}, {"n0", "n1"})),
        ("5Gi", ({"n0", "n1"}, {"n0"})),
        ("5119Mi", ({"n0"}, {"n0"})),
    ):
        cluster.capacity("r1", "made", left, {HOST: "n1"})
        assert verdicts() == expected
    cluster.capacity("r0", "made", "9Gi", {HOST: "n2"})
    assert verdicts() == ({"n2"}, {"n2"})
    cluster.storage_class("made", provisioner="csi.other")
    assert verdicts() == ({"n0", "n1", "n2"}, {"n0", "n1", "n2"})


def test_a_verdict_from_before_a_placement_is_not_used_after_it_is_taken_back() -> None:
    cluster = _cluster()
    cluster.claim("c")
    cluster.volume("v", terms=on(HOST, "n1"))
    pod = pod_with("p", "c")
    versions = [cluster.tables.volumes.version]
    for change in (
        lambda: cluster.place(pod),
        lambda: cluster.tables.remove(pod.metadata.uid),
        lambda: cluster.place(pod),
        lambda: cluster.volume("v", terms=on(HOST, "n2")),
    ):
        change()
        versions.append(cluster.tables.volumes.version)
    assert versions == sorted(set(versions))


def test_storage_that_takes_no_volume_takes_none() -> None:
    cluster = _cluster()
    cluster.tables.volumes.set_driver("csi.test", reports_storage=True)
    cluster.claim("c", class_name="made", size="5Gi")
    cluster.capacity("r0", "made", "9Gi", {HOST: "n0"}, maximumVolumeSize="0")
    cluster.capacity("r1", "made", "9Gi", {HOST: "n1"}, maximumVolumeSize="5Gi")
    assert cluster.feasible(pod_with("p", "c")) == {"n1"}


def test_replicas_with_claims_of_their_own_have_shapes_of_their_own() -> None:
    cluster = _cluster()
    for number in range(200):
        cluster.volume(f"v{number}", size="1Gi", terms=on(HOST, f"n{number % 3}"))
        cluster.claim(f"data-web-{number}")
    taken = [
        next(
            iter(
                _planned(cluster.place(pod_with(f"web-{number}", f"data-web-{number}")))[1].items()
            )
        )
        for number in range(200)
    ]
    assert [claim for claim, _ in taken] == [f"default/data-web-{n}" for n in range(200)]
    assert len({volume for _, volume in taken}) == 200


# --- one pod only, and disks ---------------------------------------------------------------------


def test_a_claim_for_one_pod_is_in_use_while_a_pod_with_it_has_a_node() -> None:
    cluster = _cluster()
    cluster.volume("v", claim="c")
    cluster.claim("c", volume="v", modes=("ReadWriteOncePod",))
    assert cluster.node_of(pod_with("p", "c")).startswith("n")
    outcome = cluster.place(pod_with("q", "c"))
    assert _message(outcome) == f"0/3 nodes are available: 3 {_IN_USE}."
    assert isinstance(outcome, Unplaced)
    assert len(outcome.diagnosis.resolvable) == 3
    cluster.tables.remove("uid-default-p")
    assert cluster.node_of(pod_with("q", "c")).startswith("n")


@pytest.mark.parametrize(
    ("first", "second", "conflict"),
    [
        ({"gcePersistentDisk": {"pdName": "d"}}, {"gcePersistentDisk": {"pdName": "d"}}, True),
        ({"gcePersistentDisk": {"pdName": "d"}}, {"gcePersistentDisk": {"pdName": "e"}}, False),
        (
            {"gcePersistentDisk": {"pdName": "d", "readOnly": True}},
            {"gcePersistentDisk": {"pdName": "d", "readOnly": True}},
            False,
        ),
        (
            {"awsElasticBlockStore": {"volumeID": "d", "readOnly": True}},
            {"awsElasticBlockStore": {"volumeID": "d", "readOnly": True}},
            True,
        ),
        (
            {"iscsi": {"iqn": "d", "readOnly": True}},
            {"iscsi": {"iqn": "d"}},
            True,
        ),
        (
            {"rbd": {"monitors": ["a", "b"], "image": "i"}},
            {"rbd": {"monitors": ["b", "c"], "image": "i", "pool": "rbd"}},
            True,
        ),
        (
            {"rbd": {"monitors": ["a"], "image": "i"}},
            {"rbd": {"monitors": ["c"], "image": "i"}},
            False,
        ),
    ],
)
def test_disks_of_pods(first: dict[str, Any], second: dict[str, Any], conflict: bool) -> None:
    cluster = _cluster()
    running = make_pod("p", node="n0", volumes=[{"name": "d", **first}])
    cluster.tables.place(booking_of(running, cluster.shapes.of(running)).booking)
    pod = make_pod("q", volumes=[{"name": "d", **second}])
    assert cluster.feasible(pod) == ({"n1", "n2"} if conflict else {"n0", "n1", "n2"})
    cluster.tables.remove(running.metadata.uid)
    assert cluster.feasible(pod) == {"n0", "n1", "n2"}


# --- limits of drivers ---------------------------------------------------------------------------


def _run(cluster: Cluster, name: str, node: str, *claims: str) -> None:
    running = pod_with(name, *claims, node=node)
    cluster.tables.place(booking_of(running, cluster.shapes.of(running)).booking)


def test_a_driver_attaches_no_more_volumes_than_it_can() -> None:
    cluster = _cluster()
    for number in range(4):
        cluster.volume(f"v{number}", claim=f"c{number}", csi=("csi.test", f"h{number}"))
        cluster.claim(f"c{number}", volume=f"v{number}")
    for node, most in (("n0", 2), ("n1", 1)):
        cluster.csi_node(node, csi_test=most)
    _run(cluster, "r0", "n0", "c0")
    _run(cluster, "r1", "n1", "c1")
    assert cluster.feasible(pod_with("p", "c2")) == {"n0", "n2"}
    # A volume that is attached already takes no further place.
    assert cluster.feasible(pod_with("p", "c1")) == {"n0", "n1", "n2"}
    assert cluster.feasible(pod_with("p", "c2", "c3")) == {"n2"}
    _run(cluster, "r2", "n0", "c0", "c2")
    assert cluster.feasible(pod_with("p", "c3")) == {"n2"}
    cluster.csi_node("n0", csi_test=3)
    assert cluster.feasible(pod_with("p", "c3")) == {"n0", "n2"}
    cluster.tables.remove("uid-default-r1")
    assert cluster.feasible(pod_with("p", "c3")) == {"n0", "n1", "n2"}


def test_attachments_without_a_pod_count_too() -> None:
    cluster = _cluster()
    for number in range(2):
        cluster.volume(f"v{number}", claim=f"c{number}", csi=("csi.test", f"h{number}"))
        cluster.claim(f"c{number}", volume=f"v{number}")
    cluster.csi_node("n0", csi_test=1)
    cluster.tables.attachments.set_attachment("a", "n0", "csi.test", "v0")
    assert cluster.feasible(pod_with("p", "c1")) == {"n1", "n2"}
    assert cluster.feasible(pod_with("p", "c0")) == {"n0", "n1", "n2"}
    cluster.tables.attachments.delete_attachment("a")
    assert cluster.feasible(pod_with("p", "c1")) == {"n0", "n1", "n2"}


def test_volumes_that_are_not_made_yet_count_with_their_class() -> None:
    cluster = _cluster()
    cluster.csi_node("n0", csi_test=1)
    for number in range(2):
        cluster.claim(f"c{number}", class_name="made")
    _run(cluster, "r0", "n0", "c0")
    outcome = cluster.feasible(pod_with("p", "c1"))
    assert outcome == {"n1", "n2"}
    # The volume that was made is the same one, and takes one place.
    cluster.volume("v0", claim="c0", csi=("csi.test", "h0"))
    cluster.claim("c0", class_name="made", volume="v0")
    assert cluster.feasible(pod_with("p", "c0")) == {"n0", "n1", "n2"}


def test_in_tree_volumes_count_where_a_driver_serves_them() -> None:
    cluster = _cluster()
    for number in range(2):
        disk = {"awsElasticBlockStore": {"volumeID": f"d{number}"}}
        cluster.volume(f"v{number}", claim=f"c{number}", **disk)
        cluster.claim(f"c{number}", volume=f"v{number}")
    cluster.csi_node("n0", "kubernetes.io/aws-ebs,x", ebs_csi_aws_com=1)
    cluster.csi_node("n1", ebs_csi_aws_com=1)
    _run(cluster, "r0", "n0", "c0")
    _run(cluster, "r1", "n1", "c0")
    assert cluster.feasible(pod_with("p", "c1")) == {"n1", "n2"}


def test_a_driver_counts_again_after_no_node_limited_it() -> None:
    cluster = _cluster()
    for number in range(3):
        cluster.volume(f"v{number}", claim=f"c{number}", csi=("csi.test", f"h{number}"))
        cluster.claim(f"c{number}", volume=f"v{number}")
    tables = cluster.tables
    cluster.csi_node("n0", csi_test=1)
    cluster.csi_node("n1", csi_test=2)
    _run(cluster, "r0", "n0", "c0")
    assert cluster.feasible(pod_with("p", "c1")) == {"n1", "n2"}
    tables.attachments.set_limits("n0", None)
    assert tables.attachments.has_limit("csi.test")
    assert cluster.feasible(pod_with("p", "c1")) == {"n0", "n1", "n2"}
    tables.attachments.set_limits("n1", None)
    assert not tables.attachments.has_limit("csi.test")
    _run(cluster, "r1", "n1", "c1", "c2")
    cluster.csi_node("n1", csi_test=2)
    cluster.csi_node("n0", csi_test=1)
    assert cluster.feasible(pod_with("p", "c2")) == {"n1", "n2"}
    assert cluster.feasible(pod_with("p", "c0")) == {"n0", "n2"}
    for node in ("n0", "n1"):
        tables.delete_node(node)
    assert not tables.attachments.has_limit("csi.test")
    # The new nodes have the rows of the old ones.
    cluster.node("n3")
    cluster.node("n1")
    assert tables.attachments.has_limit("csi.test")
    assert cluster.feasible(pod_with("p", "c0", "c1", "c2")) == {"n2", "n3"}


def test_of_a_csi_node_with_too_many_names_the_first_drivers_count() -> None:
    cluster = _cluster()
    plugins = ",".join(["kubernetes.io/aws-ebs", *(f"plugin-{number}" for number in range(99))])
    cluster.csi_node("n0", plugins, **{f"d{number}": 1 for number in range(65)})
    assert cluster.tables.attachments.has_limit("d63")
    assert not cluster.tables.attachments.has_limit("d64")
    limits = limits_of(CSINode(ObjectMeta(annotations={ANNOTATION_MIGRATED_PLUGINS: plugins})))
    assert limits.migrated == {"kubernetes.io/aws-ebs"}


def test_a_driver_without_a_count_limits_nothing() -> None:
    drivers = (
        CSINodeDriver("none"),
        CSINodeDriver("unsaid", allocatable=VolumeNodeResources()),
        CSINodeDriver("zero", allocatable=VolumeNodeResources(count=0)),
        CSINodeDriver("huge", allocatable=VolumeNodeResources(count=2**40)),
    )
    limits = limits_of(CSINode(ObjectMeta(), CSINodeSpec(drivers)))
    assert limits.most == {"zero": 0, "huge": 2**31}


def test_the_message_of_a_full_driver() -> None:
    cluster = Cluster()
    cluster.node("n0")
    cluster.csi_node("n0", csi_test=0)
    cluster.volume("v", claim="c", csi=("csi.test", "h"))
    cluster.claim("c", volume="v")
    message = "0/1 nodes are available: 1 node(s) exceed max volume count."
    outcome = cluster.place(pod_with("p", "c"))
    assert _message(outcome) == message
    assert isinstance(outcome, Unplaced)
    assert len(outcome.diagnosis.resolvable) == 1


def test_each_driver_of_a_pods_volumes_counts() -> None:
    cluster = _cluster()
    for number, driver in enumerate(("csi.none", "csi.a", "csi.b")):
        cluster.volume(f"v{number}", claim=f"c{number}", csi=(driver, "h"))
        cluster.claim(f"c{number}", volume=f"v{number}")
    cluster.csi_node("n0", csi_a=0)
    cluster.csi_node("n1", csi_b=0)
    pods = (pod_with("p", "c0", "c1", "c2"), pod_with("q", "c2", "c1", "c0"))
    assert [cluster.feasible(pod) for pod in pods] == [{"n2"}, {"n2"}]
    # The same volume is of another driver now.
    cluster.volume("v1", claim="c1", csi=("csi.none", "h"))
    assert [cluster.feasible(pod) for pod in pods] == [{"n0", "n2"}, {"n0", "n2"}]


def test_a_claim_that_is_missing_refuses_the_pod_before_it_is_known_to_be_for_one() -> None:
    cluster = _cluster()
    pod = cluster.shapes.of(pod_with("p", "c"))
    with pytest.raises(Refusal, match='persistentvolumeclaim "c" not found') as raised:
        VolumeRestrictions().applies(pod, cluster.tables)
    assert raised.value.plugin == "VolumeRestrictions"
    cluster.claim("c", volume="v", modes=("ReadWriteMany",))
    assert not VolumeRestrictions().applies(pod, cluster.tables)


# --- tables --------------------------------------------------------------------------------------


def test_whether_a_node_reaches_a_volume_is_known_of_known_nodes() -> None:
    cluster = _cluster()
    cluster.volume("v", terms=on(HOST, "n1"))
    reaches = cluster.tables.reaches_volume
    assert [reaches("v", node) for node in ("n0", "n1", "gone")] == [False, True, None]
    assert reaches("unknown", "n1") is False


def test_the_node_of_a_claim_is_the_selected_one_or_that_of_a_pod_that_plans_with_it() -> None:
    cluster = _cluster()
    volumes = cluster.tables.volumes
    cluster.claim("c", class_name="made")

    def node() -> str:
        claim = volumes.claim("default/c")
        assert claim is not None
        return volumes.node_of(claim)

    assert node() == ""
    pod = pod_with("p", "c")
    for other in ("n0", "n2"):
        cluster.tables.delete_node(other)
    assert _planned(cluster.place(pod)) == ("n1", {}, ("default/c",))
    assert node() == "n1"
    cluster.claim("c", class_name="made", annotations={"volume.kubernetes.io/selected-node": "n2"})
    assert node() == "n2"
    cluster.claim("c", class_name="made")
    cluster.tables.remove(pod.metadata.uid)
    assert node() == ""


def test_an_attachment_takes_a_place_of_the_driver_that_it_names() -> None:
    cluster = _cluster()
    cluster.volume("v0", claim="c0", csi=("csi.old", "h0"))
    cluster.volume("v1", claim="c1", csi=("csi.test", "h1"))
    cluster.claim("c1", volume="v1")
    cluster.csi_node("n0", csi_test=1)
    cluster.tables.attachments.set_attachment("a", "n0", "csi.test", "v0")
    assert cluster.feasible(pod_with("p", "c1")) == {"n1", "n2"}
    # It may move to another node, and its volume may be unknown.
    cluster.tables.attachments.set_attachment("a", "n1", "csi.test", "v0")
    assert cluster.feasible(pod_with("p", "c1")) == {"n0", "n1", "n2"}
    cluster.tables.attachments.set_attachment("b", "n0", "csi.test", "unknown")
    assert cluster.feasible(pod_with("p", "c1")) == {"n0", "n1", "n2"}


def test_a_class_that_changes_concerns_the_unbound_claims_with_it() -> None:
    cluster = _cluster()
    for name, fields in (
        ("made", {"class_name": "made"}),
        ("other", {"class_name": "wait"}),
        ("bound", {"class_name": "made", "volume": "v"}),
    ):
        cluster.claim(name, **fields)
    told: list[str] = []
    cluster.tables.volumes.claim_changed.append(told.append)
    cluster.storage_class("made", provisioner="csi.test")
    assert told == []
    cluster.storage_class("made", provisioner="csi.other")
    assert told == ["default/made"]
    cluster.tables.volumes.delete_class("made")
    assert told == ["default/made"] * 2


def test_a_volume_that_becomes_another_kind_is_found_as_that() -> None:
    cluster = _cluster()
    cluster.claim("c", modes=("ReadWriteMany",))
    cluster.volume("v", terms=on(HOST, "n1"))
    assert cluster.feasible(pod_with("p", "c")) == set()
    cluster.volume("v", modes=("ReadWriteMany", "ReadWriteOnce"), terms=on(HOST, "n1"))
    assert cluster.feasible(pod_with("p", "c")) == {"n1"}
    cluster.volume("v", modes=("ReadWriteMany",), terms=on(HOST, "n1"), volumeMode="Block")
    assert cluster.feasible(pod_with("p", "c")) == set()


def test_a_volume_that_moves_to_another_class_is_found_there_alone() -> None:
    cluster = _cluster()
    volumes = cluster.tables.volumes
    for name in ("v", "w"):
        cluster.volume(name)

    def names(class_name: str) -> list[str]:
        return [each.name for each in volumes.candidates(class_name).volumes]

    assert (names("wait"), names("made")) == (["v", "w"], [])
    cluster.volume("v", class_name="made")
    assert (names("wait"), names("made")) == (["w"], ["v"])
    cluster.volume("v", class_name="made", labels={"a": "b"})
    assert (names("wait"), names("made")) == (["w"], ["v"])
    volumes.delete_volume("v")
    assert (names("wait"), names("made")) == (["w"], [])
    # One that grows is no longer the smallest that fits.
    cluster.volume("x", size="2Gi")
    assert names("wait") == ["w", "x"]
    cluster.volume("w", size="3Gi")
    assert names("wait") == ["x", "w"]


def test_a_driver_that_no_longer_reports_its_storage_has_enough() -> None:
    cluster = _cluster()
    cluster.claim("c", class_name="made")
    for reports, nodes in ((True, set()), (False, {"n0", "n1", "n2"}), (True, set())):
        cluster.tables.volumes.set_driver("csi.test", reports_storage=reports)
        assert cluster.feasible(pod_with("p", "c")) == nodes


def test_a_planned_volume_that_is_gone_is_reserved_for_nothing() -> None:
    cluster = _cluster()
    volumes = cluster.tables.volumes
    cluster.claim("c")
    cluster.volume("v", terms=on(HOST, "n1"))
    assert cluster.node_of(pod_with("p", "c")) == "n1"
    claim = volumes.claim("default/c")
    assert claim is not None
    reserved = volumes.reserved_for(claim)
    assert reserved is not None and reserved.name == "v"
    volumes.delete_volume("v")
    assert volumes.reserved_for(claim) is None


def test_volumes_that_are_attached_count_when_their_driver_gets_its_first_limit() -> None:
    cluster = _cluster()
    for number in range(2):
        cluster.volume(f"v{number}", claim=f"c{number}", csi=("csi.test", f"h{number}"))
        cluster.claim(f"c{number}", volume=f"v{number}")
    cluster.csi_node("n1", csi_other=1)
    _run(cluster, "r0", "n0", "c0")
    assert cluster.feasible(pod_with("p", "c1")) == {"n0", "n1", "n2"}
    # Has all rows counted, of drivers with limits.
    assert not cluster.tables.attachments.has_limit("csi.test")
    cluster.volume("v2", claim="c2", csi=("csi.other", "h2"))
    cluster.claim("c2", volume="v2")
    assert cluster.feasible(pod_with("q", "c2")) == {"n0", "n1", "n2"}
    cluster.csi_node("n0", csi_test=1)
    assert cluster.feasible(pod_with("p", "c1")) == {"n1", "n2"}
