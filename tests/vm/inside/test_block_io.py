"""Block I/O control of koordlet's unit on a real kernel with cgroup v2.

/dev/vdd and /dev/vde lose what is written; /dev/vde has the BFQ scheduler, /dev/vdb and the others
have neither BFQ nor iocost. The processes are in groups of the test below the QoS slices, and each
test waits for a state: nothing depends on the speed of the machine.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest

from koordctl.client import Client, Refused
from tests.e2e.manifests import nodeslo
from tests.vm.inside.node import BFQ_DISK, CGROUPS
from tests.vm.inside.service import BE_IDLE, GATES, LS_PROTECTED, RUN, Service
from tests.waiting import wait_until

_DISK: Final = "vdd"
_WITHOUT: Final = "vdb"
"""A disk for which iocost is never set up."""
_BEST_EFFORT: Final = CGROUPS / "kubepods.slice/kubepods-besteffort.slice"
_BURSTABLE: Final = CGROUPS / "kubepods.slice/kubepods-burstable.slice"
_FILES: Final = ("io.max", "io.weight", "io.bfq.weight")
_MODEL: Final = {
    "modelReadBPS": 1 << 20,
    "modelReadSeqIOPS": 200,
    "modelReadRandIOPS": 190,
    "modelWriteBPS": 2 << 20,
    "modelWriteSeqIOPS": 180,
    "modelWriteRandIOPS": 170,
}
"""A slow disk, so that its shares count and not the processors."""
_WRITE: Final = "dd if=/dev/zero of=/dev/vdd oflag=direct"
_READ: Final = "dd if=/dev/vdd of=/dev/null iflag=direct"

Blocks = tuple[Mapping[str, Any], ...]


def block(disk: str, **config: Any) -> Mapping[str, Any]:
    return {"name": f"/dev/{disk}", "type": "device", "ioCfg": config}


def put(service: Service, *, be: Blocks = (), ls: Blocks = (), root: Blocks = ()) -> None:
    """Give koordlet a NodeSLO with these blocks; a class without blocks is off."""

    def qos(blocks: Blocks) -> Mapping[str, Any]:
        return {"blkioQOS": {"enable": bool(blocks), "blocks": list(blocks)}}

    classes = {"beClass": {**BE_IDLE, **qos(be)}, "lsClass": {**LS_PROTECTED, **qos(ls)}}
    service.put(nodeslo(**classes, cgroupRoot=qos(root)))


def number(disk: str) -> str:
    return Path(f"/sys/class/block/{disk}/dev").read_text().strip()


def line(folder: Path, file: str, disk: str = _DISK) -> str:
    """What the kernel has for a disk; "" for nothing."""
    found = re.search(rf"^{number(disk)} (.*)$", (folder / file).read_text(), re.MULTILINE)
    return found[1] if found else ""


def lines() -> dict[tuple[str, str, str], str]:
    return {
        (folder.name, file, disk): line(folder, file, disk)
        for folder in (_BEST_EFFORT, _BURSTABLE)
        for file in _FILES
        for disk in (_DISK, BFQ_DISK, _WITHOUT)
    }


def wait(condition: Callable[[], object], what: str) -> None:
    wait_until(condition, what, timeout_s=120, every_s=0.1)


def explained(file: Path, disk: str) -> Mapping[str, Any]:
    """What koordlet says of a disk's value in a file; {} while there is nothing to say."""
    try:
        answer = Client(str(RUN)).get("/explain", {"kind": "file", "name": str(file)})
    except Refused:  # no policy claims the file yet
        return {}
    values = [value for subject in answer["subjects"] for value in subject["values"]]
    return next((each for each in values if each["key"] == number(disk)), {})


@dataclass(frozen=True, slots=True)
class Worker:
    """A process with direct I/O to the disk, in a group of its own."""

    process: subprocess.Popen[bytes]
    group: Path

    def done(self) -> bool:
        return self.process.poll() is not None

    def bytes(self, name: str) -> int:
        """Bytes read (rbytes) or written (wbytes), or requests (rios, wios), of this group."""
        found = re.search(rf" {name}=(\d+)", f" {line(self.group, 'io.stat')}")
        return int(found[1]) if found else 0


@contextmanager
def working(slice_: Path, name: str, command: str) -> Iterator[Worker]:
    """A shell command in a new group below a slice; both are gone with the block."""
    group = slice_ / f"koord-test-{name}"
    (slice_ / "cgroup.subtree_control").write_text("+io")
    group.mkdir()
    script = f"echo $$ > {group}/cgroup.procs; {command} 2> /dev/null"
    process = subprocess.Popen(["/bin/bash", "-c", script])
    try:
        yield Worker(process, group)
    finally:
        (group / "cgroup.kill").write_text("1")
        process.wait(120)
        wait(lambda: "populated 0" in (group / "cgroup.events").read_text(), "its processes ended")
        group.rmdir()


@pytest.fixture(scope="module")
def controlled(service: Service) -> Iterator[Service]:
    """The unit with the gate on. When it goes off, all is as before but iocost's lines, which the
    kernel keeps for a disk: they say that it is off."""
    (_BEST_EFFORT / "io.max").write_text(f"{number(_DISK)} riops=7777")
    before = lines()
    assert not line(CGROUPS, "io.cost.qos")
    service.gates(GATES | {"BlkIOReconcile": True})
    try:
        yield service
        put(
            service,
            be=(block(_DISK, readIOPS=5, ioWeightPercent=3), block(BFQ_DISK, ioWeightPercent=4)),
            root=(block(_DISK),),
        )
        wait(lambda: line(_BEST_EFFORT, "io.weight") == "3", "all is claimed again")
        service.gates(GATES)
        wait(lambda: lines() == before, "the originals are back")
        assert line(CGROUPS, "io.cost.qos").startswith("enable=0 ctrl=auto ")
        assert line(CGROUPS, "io.cost.model").startswith("ctrl=auto ")
        put(service)  # the next pass sees that nothing is left to restore
        wait(lambda: service.status()["reconciler"]["restoring"] == [], "all is restored")
    finally:
        service.gates(GATES)
        service.put(nodeslo(beClass=BE_IDLE, lsClass=LS_PROTECTED))
        (_BEST_EFFORT / "io.max").write_text(f"{number(_DISK)} riops=max")


def test_a_refused_value_is_reported_and_costs_itself_alone(controlled: Service) -> None:
    """No iocost for a disk yet, no io.latency in this kernel, no such disk: the rest counts."""
    assert not (_BEST_EFFORT / "io.latency").exists(), "this kernel has io.latency: test it here"
    put(
        controlled,
        be=(
            block(_WITHOUT, ioWeightPercent=9),
            block("vdz", writeBPS=1 << 20),
            block(_DISK, writeIOPS=44, readLatency=500),
        ),
    )
    wait(lambda: "wiops=44" in line(_BEST_EFFORT, "io.max"), "the good values are in force")
    weight = explained(_BEST_EFFORT / "io.weight", _WITHOUT)
    assert weight["state"] == "unsupported"
    assert "Operation not supported" in weight["detail"]
    latency = explained(_BEST_EFFORT / "io.latency", _DISK)
    assert (latency["state"], latency["desired"]) == ("unsupported", "500")
    status = controlled.status()
    assert "io.latency" in status["kernel"]["unsupported"]["io.latency"]
    (policy,) = [each for each in status["policies"] if each["name"] == "BlkIO"]
    assert "/dev/vdz" in policy["why"]
    assert status["reconciler"]["troubled"] == []
    assert line(_BEST_EFFORT, "io.max") == "rbps=max wbps=max riops=7777 wiops=44"


def test_the_kernel_has_each_value_as_decided(controlled: Service) -> None:
    put(
        controlled,
        be=(
            block(_DISK, readBPS=3 << 20, writeBPS=2 << 20, readIOPS=300, ioWeightPercent=7),
            block(BFQ_DISK, writeIOPS=200, ioWeightPercent=8),
        ),
        ls=(block(_DISK, ioWeightPercent=90), block(BFQ_DISK, ioWeightPercent=80)),
        root=(
            block(
                _DISK,
                readLatency=2500,
                writeLatency=4500,
                readLatencyPercent=90,
                writeLatencyPercent=85,
                enableUserModel=True,
                **_MODEL,
            ),
        ),
    )
    limits = "rbps=3145728 wbps=2097152 riops=300 wiops=max"
    wait(lambda: line(_BEST_EFFORT, "io.max") == limits, "limits")
    other_limits = "rbps=max wbps=max riops=max wiops=200"
    wait(lambda: line(_BEST_EFFORT, "io.max", BFQ_DISK) == other_limits, "a limit with BFQ")
    wait(lambda: line(_BEST_EFFORT, "io.weight") == "7", "a weight of iocost")
    wait(lambda: line(_BURSTABLE, "io.weight") == "90", "a weight of iocost")
    wait(lambda: line(_BEST_EFFORT, "io.bfq.weight", BFQ_DISK) == "8", "a weight of BFQ")
    wait(lambda: line(_BURSTABLE, "io.bfq.weight", BFQ_DISK) == "80", "a weight of BFQ")
    qos = "enable=1 ctrl=user rpct=90.00 rlat=2500 wpct=85.00 wlat=4500 "
    assert line(CGROUPS, "io.cost.qos").startswith(qos)
    assert line(CGROUPS, "io.cost.model") == (
        "ctrl=user model=linear rbps=1048576 rseqiops=200 rrandiops=190"
        " wbps=2097152 wseqiops=180 wrandiops=170"
    )
    assert controlled.status()["reconciler"]["troubled"] == []


def test_a_limited_process_waits_until_its_limit_is_gone(controlled: Service) -> None:
    """4 MiB at 64 KiB/s take a minute; beside them the same amount without a limit is done."""
    limit = {"readBPS": 64 << 10, "writeBPS": 64 << 10}
    amount = "bs=64k count=64"
    put(controlled, be=(block(_DISK, **limit),))
    wait(lambda: line(_BEST_EFFORT, "io.max").startswith("rbps=65536 wbps=65536"), "limits")
    with (
        working(_BEST_EFFORT, "writer", f"{_WRITE} {amount}") as writer,
        working(_BEST_EFFORT, "reader", f"{_READ} {amount}") as reader,
    ):
        wait(lambda: writer.bytes("wbytes") and reader.bytes("rbytes"), "both have begun")
        with working(_BURSTABLE, "free", f"{_WRITE} {amount}; {_READ} {amount}") as free:
            wait(free.done, "the processes without a limit are done")
            assert free.bytes("wbytes") == free.bytes("rbytes") == 4 << 20
        assert not writer.done() and not reader.done()
        assert writer.bytes("wbytes") < 2 << 20
        assert reader.bytes("rbytes") < 2 << 20
        put(controlled)
        wait(lambda: writer.done() and reader.done(), "they go on without the limit")
        assert writer.bytes("wbytes") == reader.bytes("rbytes") == 4 << 20


def test_iocost_shares_a_slow_disk_by_weight(controlled: Service) -> None:
    """A hundred times the weight; a third of it serves to see that it counts at all."""
    slow = block(_DISK, readLatency=1000000, writeLatency=1000000, enableUserModel=True, **_MODEL)
    put(
        controlled,
        be=(block(_DISK, ioWeightPercent=1),),
        ls=(block(_DISK, ioWeightPercent=100),),
        root=(slow,),
    )
    wait(lambda: line(_BEST_EFFORT, "io.weight") == "1", "the weights")
    wait(lambda: line(_BURSTABLE, "io.weight") == "100", "the weights")
    forever = f"while :; do {_WRITE} bs=4k; done"
    with (
        working(_BEST_EFFORT, "batch", forever) as batch,
        working(_BURSTABLE, "web", forever) as web,
    ):
        wait(lambda: web.bytes("wios") and batch.bytes("wios"), "both have begun")
        web_before, batch_before = web.bytes("wios"), batch.bytes("wios")

        def by_weight() -> bool:
            served = web.bytes("wios") - web_before
            return served > 100 and served > 3 * (batch.bytes("wios") - batch_before)

        wait(by_weight, "the service gets most of the disk")
