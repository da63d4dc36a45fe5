"""Clusters for `koordctl simulate`: dumps in a folder, and what the command says about them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from koordctl.main import main
from tests.cluster.scheduler.simulation.dumps import (
    Tree,
    workload,
    write,
)
from tests.cluster.scheduler.volumes.making import claim_json, volume_json


class Cluster:
    """A folder with a dump, a file of pods and configurations."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder = folder
        self.dump = folder / "dump"
        self.dump.mkdir()
        self._capsys = capsys

    def write(self, *objects: Tree, name: str = "cluster.json") -> None:
        write(self.dump / name, *objects)

    def pods(self, *objects: Tree) -> str:
        path = self.folder / "pods.yaml"
        path.write_text("\n---\n".join(yaml.safe_dump(each) for each in objects))
        return str(path)

    def config(self, text: str, name: str = "config.yaml") -> str:
        path = self.folder / name
        path.write_text(text)
        return str(path)

    def run(self, *arguments: str, cluster: str = "") -> tuple[int, str, str]:
        """Return exit status, output and errors."""
        status = main(["simulate", "--cluster", cluster or str(self.dump), *arguments])
        captured = self._capsys.readouterr()
        return status, captured.out, captured.err

    def ask(self, *arguments: str, cluster: str = "") -> dict[str, Any]:
        status, out, err = self.run("-o", "json", *arguments, cluster=cluster)
        assert status in (0, 1), err
        found: dict[str, Any] = json.loads(out)
        return found


def states_of(found: dict[str, Any]) -> dict[str, str]:
    return {each["pod"]: each["node"] or each["state"] for each in found["pods"]}


def claim_of(name: str, **fields: Any) -> Tree:
    return {"apiVersion": "v1", "kind": "PersistentVolumeClaim", **claim_json(name, **fields)}


def volume_of(name: str, **fields: Any) -> Tree:
    return {"apiVersion": "v1", "kind": "PersistentVolume", **volume_json(name, **fields)}


def storage_class(name: str, provisioner: str, *, default: bool = False) -> Tree:
    annotations = {"storageclass.kubernetes.io/is-default-class": str(default).lower()}
    return {
        "apiVersion": "storage.k8s.io/v1",
        "kind": "StorageClass",
        "metadata": {"name": name, "annotations": annotations},
        "provisioner": provisioner,
        "volumeBindingMode": "WaitForFirstConsumer",
    }


def with_data(replicas: int) -> Tree:
    """Return a StatefulSet web whose template has claims data-web-N of the class disk."""
    made = workload("StatefulSet", "web", replicas)
    spec = claim_json("data", class_name="disk")["spec"]
    made["spec"]["volumeClaimTemplates"] = [{"metadata": {"name": "data"}, "spec": spec}]
    return made
