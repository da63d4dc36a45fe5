"""The stages of the hook protocol and the CRI calls that they belong to.

Names are those of the registration files (docs/facts/runtime-proxy.md, "Stages"). Two stages are
ours: upstream names PreRemoveRunPodSandbox and never calls it, and has none for
UpdatePodSandboxResources.
"""

import enum


class Stage(enum.Enum):
    PRE_RUN_POD_SANDBOX = "PreRunPodSandbox"
    POST_STOP_POD_SANDBOX = "PostStopPodSandbox"
    PRE_REMOVE_POD_SANDBOX = "PreRemoveRunPodSandbox"
    PRE_UPDATE_POD_SANDBOX_RESOURCES = "PreUpdatePodSandboxResources"
    PRE_CREATE_CONTAINER = "PreCreateContainer"
    PRE_START_CONTAINER = "PreStartContainer"
    POST_START_CONTAINER = "PostStartContainer"
    PRE_UPDATE_CONTAINER_RESOURCES = "PreUpdateContainerResources"
    POST_STOP_CONTAINER = "PostStopContainer"

    @property
    def method(self) -> bytes:
        """The path of the hook server's gRPC method."""
        return f"/runtime.v1alpha1.RuntimeHookService/{self.value}Hook".encode()

    @property
    def may_refuse(self) -> bool:
        """Return whether the call can fail for lack of an answer. Stops and removals never do."""
        return self.value.startswith("Pre") and self is not Stage.PRE_REMOVE_POD_SANDBOX

    @property
    def is_addition(self) -> bool:
        """Return whether the stage is ours: a server may list it and answer UNIMPLEMENTED."""
        return self in (Stage.PRE_REMOVE_POD_SANDBOX, Stage.PRE_UPDATE_POD_SANDBOX_RESOURCES)


class CriMethod(enum.Enum):
    RUN_POD_SANDBOX = "RunPodSandbox"
    STOP_POD_SANDBOX = "StopPodSandbox"
    REMOVE_POD_SANDBOX = "RemovePodSandbox"
    UPDATE_POD_SANDBOX_RESOURCES = "UpdatePodSandboxResources"
    CREATE_CONTAINER = "CreateContainer"
    START_CONTAINER = "StartContainer"
    STOP_CONTAINER = "StopContainer"
    REMOVE_CONTAINER = "RemoveContainer"
    UPDATE_CONTAINER_RESOURCES = "UpdateContainerResources"


# v1alpha2 gives every message that we read the same numbers as v1.
CRI_PACKAGES = ("runtime.v1", "runtime.v1alpha2")

INTERCEPTED_PATHS: dict[bytes, CriMethod] = {
    f"/{package}.RuntimeService/{method.value}".encode(): method
    for package in CRI_PACKAGES
    for method in CriMethod
}
