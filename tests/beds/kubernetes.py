"""Programs of a real Kubernetes: kube-apiserver, etcd, kubelet, kubectl, kube-scheduler.

They are looked for as envtest does, in KUBEBUILDER_ASSETS and /usr/local/kubebuilder/bin, and then
in a folder beside the checkout that may hold them as NAME.xz: those are unpacked on first use.
"""

from __future__ import annotations

import lzma
import os
import shutil
import tempfile
from pathlib import Path

from tests.beds.errors import BedError
from tests.beds.packages import CHECKOUT, locked

ARCHIVES = CHECKOUT.parent / "shared" / "envtest"
UNPACKED = CHECKOUT / ".cache" / "envtest"
API_SERVER = ("kube-apiserver", "etcd")
KUBELET = (*API_SERVER, "kubelet")


def programs(*names: str) -> Path:
    """Return the first folder that has all of the programs. BedError says what to do if none has.

    One folder, so that the programs are of one release.
    """
    folders = [Path("/usr/local/kubebuilder/bin"), UNPACKED]
    if named := os.environ.get("KUBEBUILDER_ASSETS"):
        folders.insert(0, Path(named))
    for folder in folders:
        if folder == UNPACKED:
            _unpack(names)
        if all(os.access(folder / name, os.X_OK) for name in names):
            return folder
    raise BedError(
        f"needs {', '.join(names)} in one folder: set KUBEBUILDER_ASSETS to a folder that has "
        f"them, or put NAME.xz of each into {ARCHIVES}"
    )


def kubectl() -> str | None:
    """Return the kubectl beside the programs above, else that of the machine."""
    try:
        return str(programs("kubectl") / "kubectl")
    except BedError:
        return shutil.which("kubectl")


def _unpack(names: tuple[str, ...]) -> None:
    """Unpack what the archives have of the programs. Safe to call from several processes."""
    UNPACKED.mkdir(parents=True, exist_ok=True)
    for name in names:
        archive, target = ARCHIVES / f"{name}.xz", UNPACKED / name
        if target.exists() or not archive.exists():
            continue
        with locked(UNPACKED / f"{name}.lock"):
            if target.exists():
                continue
            # Beside the target, so that the whole program appears in one step.
            with tempfile.TemporaryDirectory(dir=UNPACKED) as scratch:
                fresh = Path(scratch) / name
                with lzma.open(archive) as packed, fresh.open("wb") as plain:
                    shutil.copyfileobj(packed, plain, 1 << 20)
                fresh.chmod(0o755)
                fresh.rename(target)
