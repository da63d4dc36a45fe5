"""The Device object: written when the machine differs, and nothing of others in it."""

from __future__ import annotations

from typing import Any

from apis import keys
from koordlet.measurement.accelerators.nvml import Answer, Gpu, GpuUsage
from koordlet.reporters.device import KeptDevice
from koordlet.reporters.device_spec import DeviceContent, device_content
from linux.pci import Place

NOON, LATER = "2026-01-01T12:00:00Z", "2026-01-01T13:00:00Z"


def kept(*codes: str, at: str = NOON) -> KeptDevice:
    """Return GPUs with these error codes; "" is healthy."""
    gpus = tuple(
        GpuUsage(Gpu(f"GPU-{n}", n, "NVIDIA A10", 1 << 34, f"0000:0{n}:00.0", code, code), ())
        for n, code in enumerate(codes)
    )
    places = {usage.gpu.bus_id: Place(0, "pci0000:00") for usage in gpus}
    return KeptDevice(device_content(Answer("570", gpus, ()), (), (), places), at)


def times(merged: dict[str, Any]) -> list[str]:
    return [
        condition["lastTransitionTime"]
        for device in merged["spec"]["devices"]
        for condition in device.get("conditions", ())
    ]


def test_a_new_object_is_owned_by_its_node() -> None:
    wanted = kept("")
    made = wanted.merge(wanted.create("n1", "uid-1"))
    (owner,) = made["metadata"]["ownerReferences"]
    assert (owner["kind"], owner["uid"], owner["controller"]) == ("Node", "uid-1", True)
    assert [device["id"] for device in made["spec"]["devices"]] == ["GPU-0"]
    assert made["metadata"]["labels"][keys.LABEL_GPU_MODEL] == "A10"


def test_the_same_machine_changes_nothing_also_with_an_unhealthy_device() -> None:
    stored = kept("", "Xid79").merge(kept("").create("n1", "u"))
    assert times(stored) == [NOON]
    assert kept("", "Xid79", at=LATER).merge(stored) == stored


def test_the_time_of_a_condition_follows_its_status() -> None:
    stored = kept("Xid79", "").merge({})
    both = kept("Xid79", "Xid48", at=LATER).merge(stored)
    assert times(both) == [NOON, LATER]
    assert times(kept("", "Xid48", at=LATER).merge(both)) == [LATER]


def test_labels_and_annotations_of_others_stay_and_outdated_ones_of_ours_go() -> None:
    stored = {
        "metadata": {
            "labels": {"theirs": "1", keys.LABEL_GPU_PARTITION_POLICY: "Honor"},
            "annotations": {"theirs": "2", keys.ANNOTATION_GPU_PARTITIONS: "{}"},
        },
        "spec": {"devices": [], "other": 1},
        "status": {"allocations": []},
    }
    merged = kept("").merge(stored)
    assert merged["metadata"]["annotations"] == {"theirs": "2"}
    assert merged["metadata"]["labels"]["theirs"] == "1"
    assert keys.LABEL_GPU_PARTITION_POLICY not in merged["metadata"]["labels"]
    assert merged["spec"]["other"] == 1
    assert merged["status"] == {"allocations": []}


def test_without_devices_there_is_no_object() -> None:
    assert KeptDevice(DeviceContent((), {}, {}), NOON).absent
    assert not kept("").absent
