"""The NodeSLO's host applications as subjects with their cgroups."""

from __future__ import annotations

from collections.abc import Sequence

from apis.errors import InputError
from apis.nodeslo import HostApplication
from apis.qos import KubeQoS
from hooks.subject import HostAppSubject
from linux import cgroup_paths
from linux.cgroup_paths import HostAppBase, Layout, PathError


def host_app_subjects(
    applications: Sequence[HostApplication], layout: Layout
) -> tuple[tuple[HostAppSubject, ...], tuple[InputError, ...]]:
    """Return the subjects, and the errors of the applications that are ignored."""
    subjects: dict[str, HostAppSubject] = {}
    errors: list[InputError] = []
    for index, application in enumerate(applications):
        field = f"spec.hostApplications[{index}]"
        name = application.name
        if not name or name in subjects:
            problem = "is declared twice; the first is used" if name else "has no name"
            errors.append(
                InputError(obj="NodeSLO", field=f"{field}.name", value=name, problem=problem)
            )
            continue
        try:
            cgroup = _directory(application, layout)
        except PathError as error:
            errors.append(
                InputError(
                    obj="NodeSLO",
                    field=f"{field}.cgroupPath",
                    value=application.cgroup_path or name,
                    problem=str(error),
                )
            )
            continue
        subjects[name] = HostAppSubject(
            name=name,
            qos=application.qos,
            cgroup=cgroup,
            priority=application.priority.value,
        )
    return tuple(subjects.values()), tuple(errors)


def _directory(application: HostApplication, layout: Layout) -> str:
    path = application.cgroup_path
    if path is None:
        return cgroup_paths.default_host_app_dir(application.qos.value, application.name)
    base = path.base.value if path.base is not None else HostAppBase.ROOT.value
    found = cgroup_paths.host_app_dir(
        layout, base=base, parent_dir=path.parent_dir, relative_path=path.relative_path
    )
    if _is_kubelets(found, layout):
        raise PathError(f"{found[:128]!r} is kubelet's own directory, not an application's")
    return found


def _is_kubelets(path: str, layout: Layout) -> bool:
    """Return whether a directory is kubelet's: the pods' root or above it, a QoS class's, a pod's.

    Two subjects would set values there, and the winner would depend on their order.
    """
    if not layout.kubepods:
        return False
    if cgroup_paths.is_below(layout.kubepods, path):
        return True
    if any(path == cgroup_paths.qos_dir(layout.driver, layout.kubepods, qos) for qos in KubeQoS):
        return True
    place = cgroup_paths.parse(path)
    return place is not None and bool(place.pod_uid)
