"""`make demo` and `make run`: koordlet with a real containerd, step by step.

Every step prints what it does and how long it took; a failure says what was missing. Pods, daemon,
containerd and cgroups are removed at the end, also after a failure or Ctrl-C.
"""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import grpc
import yaml

from demo import scene
from demo.table import render
from tests.beds.containerd import GENERATIONS, Containerd, containerd
from tests.beds.daemon import Daemon, daemon
from tests.beds.errors import BedError
from tests.beds.image import IMAGE
from tests.beds.kubelet import RunningPod, remove_pod, run_pod, running_pod
from tests.waiting import NotWithin, wait_until


class MissingImage(Exception):
    """A pod names an image that the demo's containerd does not have; the text says what to do."""


HEADER = ("container", "value", "requested", "observed", "why")


@contextmanager
def step(text: str) -> Iterator[None]:
    print(f"  {text} ...", end="", flush=True)
    begin = time.monotonic()
    try:
        yield
    except BaseException:
        print(" failed", flush=True)
        raise
    print(f" {time.monotonic() - begin:.1f} s", flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m demo", description=__doc__)
    parser.add_argument("--containerd", choices=GENERATIONS, default="2.1", help="which containerd")
    parser.add_argument("--stay", action="store_true", help="keep the environment open")
    chosen = parser.parse_args(arguments)
    # SIGTERM cleans up as Ctrl-C does.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with ExitStack() as stack:
            show_node(stack, chosen.containerd, stay=chosen.stay)
    except BedError as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    except grpc.RpcError as error:
        print(f"demo: the runtime refused: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ninterrupted; everything is cleaned up", file=sys.stderr)
        return 130
    print("Cleaned up: no pod, process or cgroup of this demo is left.")
    return 0


def show_node(stack: ExitStack, generation: Any, *, stay: bool) -> None:
    begin = time.monotonic()
    print(f"A node with containerd {generation}, koordlet and four pods", flush=True)
    with step("containerd with NRI, in folders and cgroups of its own"):
        bed = stack.enter_context(containerd(generation))
    objects = scene.objects()
    with step("koordlet, on the objects in examples/objects"):
        koordlet = stack.enter_context(daemon(bed, objects, gates=scene.GATES))
    pods = {}
    for manifest in scene.pods():
        name = manifest["metadata"]["name"]
        qos = manifest["metadata"]["labels"]["koordinator.sh/qosClass"]
        with step(f"pod {name}, class {qos}"):
            koordlet.put(manifest)
            pods[name] = manifest, stack.enter_context(running_pod(bed, manifest))
    show_values(bed, koordlet, pods)
    switch_off(bed, koordlet, pods, objects)
    print(f"\n{time.monotonic() - begin:.1f} s so far.", flush=True)
    if stay:
        follow_manifests(bed, koordlet)


Pods = dict[str, tuple[scene.Manifest, RunningPod]]


def show_values(bed: Containerd, koordlet: Daemon, pods: Pods) -> None:
    rows = []
    for shown in scene.SHOWN:
        manifest, pod = pods[shown.pod]
        why = explained(koordlet, shown)
        requested, observed = scene.requested(manifest, shown), scene.observed(bed, pod, shown)
        rows.append((shown.whose, scene.label(bed, shown), requested, observed, why))
    print("\nRead back from the kernel and from the containers' environment:\n")
    print(render(HEADER, rows, width=terminal_width()), flush=True)


def explained(koordlet: Daemon, shown: scene.Shown) -> str:
    """Return the daemon's explanation of the value, once the daemon reports it in force."""
    subject = f"default/{shown.pod}" + ("/main" if shown.level == "container" else "")
    answer: Any = None

    def in_force() -> bool:
        nonlocal answer
        for found in koordlet.query("explain", shown.level, subject)["subjects"]:
            for value in found["values"]:
                if (found["level"], value["resource"], value["key"]) == (
                    shown.level,
                    shown.resource,
                    shown.key,
                ):
                    answer = value
        return answer is not None and answer["state"] in ("applied", "degraded", "at creation")

    try:
        wait_until(in_force, shown.resource)
    except NotWithin as error:
        raise BedError(f"{shown.whose}: {shown.resource} is not in force: {answer}") from error
    return f"{answer['why']} [{answer['winner']['source']}]"


def await_value(bed: Containerd, pod: RunningPod, shown: scene.Shown, value: str) -> None:
    try:
        wait_until(lambda: scene.observed(bed, pod, shown) == value, shown.resource)
    except NotWithin as error:
        found = scene.observed(bed, pod, shown)
        raise BedError(
            f"{shown.whose}: {scene.label(bed, shown)} is {found} and not {value}"
        ) from error


def terminal_width() -> int:
    return shutil.get_terminal_size((120, 40)).columns


def switch_off(
    bed: Containerd, koordlet: Daemon, pods: Pods, objects: list[scene.Manifest]
) -> None:
    """Switch two policies off in the objects and show that the old values come back."""
    before = [scene.observed(bed, pods[shown.pod][1], shown) for shown in scene.RESTORED]
    print()
    with step("CPU normalisation off (Node), group identity off for class BE (NodeSLO)"):
        koordlet.put(*scene.switched_off(objects))
        for shown in scene.RESTORED:
            await_value(bed, pods[shown.pod][1], shown, scene.original(bed, shown))
    rows = [
        (shown.whose, scene.label(bed, shown), old, scene.observed(bed, pods[shown.pod][1], shown))
        for shown, old in zip(scene.RESTORED, before, strict=True)
    ]
    print(render(("container", "value", "before", "restored"), rows, width=80), flush=True)


def follow_manifests(bed: Containerd, koordlet: Daemon) -> None:
    """Run the pods whose manifests lie in a folder, until Ctrl-C."""
    manifests = bed.folder / "pods.d"
    manifests.mkdir()
    koordctl = f"{Path(sys.executable).parent}/koordctl --run-dir {koordlet.run_dir}"
    images = f"{bed.binaries}/ctr -a {bed.socket} -n k8s.io images"
    print(
        f"""
The environment stays open; Ctrl-C ends it. From another terminal:

  {koordctl} status
  {koordctl} explain container default/web/main
  {koordctl} doctor --config {koordlet.config}

  the node's objects     {koordlet.objects}/   edit a file and see the values follow
  pods of your own       {manifests}/   put a Pod manifest there to run it, remove it to end it
  the daemon's log       {koordlet.log}

Pods may use the images that this containerd has. That is {IMAGE}, which a container without
"image" gets; it has a shell and busybox's commands. To see them, and to add one:

  {images} list
  {images} pull docker.io/library/nginx:latest
  docker save my-image:1 | {images} import -
""",
        flush=True,
    )
    running: dict[Path, RunningPod] = {}
    refused: set[Path] = set()
    waiting: set[Path] = set()
    try:
        while True:
            files = set(manifests.glob("*.yaml"))
            for file in files - running.keys() - refused:
                try:
                    running[file] = start_pod(bed, koordlet, file)
                except MissingImage as missing:
                    if file not in waiting:
                        print(f"  {file.name}: {missing}", flush=True)
                    waiting.add(file)
                except (OSError, yaml.YAMLError, LookupError, TypeError, grpc.RpcError) as error:
                    refused.add(file)
                    print(f"  {file.name}: {error}; put a corrected file under another name")
            waiting &= files - running.keys()
            for file in running.keys() - files:
                remove_pod(bed, running.pop(file))
                print(f"  {file.name}: ended", flush=True)
            time.sleep(0.3)
    finally:
        for pod in running.values():
            remove_pod(bed, pod)


def start_pod(bed: Containerd, koordlet: Daemon, file: Path) -> RunningPod:
    manifest = yaml.safe_load(file.read_text())
    manifest["metadata"].setdefault("uid", str(uuid.uuid4()))
    manifest["metadata"].setdefault("namespace", "default")
    for container in manifest["spec"]["containers"]:
        image = container.get("image", IMAGE)
        if not bed.cri.has_image(image):
            raise MissingImage(
                f'container "{container["name"]}" waits for image "{image}", which this containerd '
                f'does not have: add it as shown above, or remove "image" to use {IMAGE}'
            )
    with step(f"{file.name}: pod {manifest['metadata']['name']}"):
        koordlet.put(manifest)
        return run_pod(bed, manifest)


if __name__ == "__main__":
    sys.exit(main())
