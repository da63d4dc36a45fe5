"""The machine's disk and kernel, built from Debian packages and kept under .cache/vm.

The disk holds a small Debian with systemd, containerd 2.1, runc, Python and the third-party
packages of the environment that builds it, all byte-compiled ahead. The project itself is not on
it: each run brings the checkout on a disk of its own (`write_payload`). What an image is made of is
its key, so a change of it builds a new one.
"""

from __future__ import annotations

import compileall
import fcntl
import functools
import hashlib
import os
import py_compile
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tests.beds.image import write_image
from tests.vm.initramfs import write_initramfs
from tests.vm.modules import ordered_modules
from tests.vm.packages import ImageError, fetch, newest_kernel_package

CHECKOUT = Path(__file__).resolve().parents[2]
CACHE = CHECKOUT / ".cache" / "vm"
Kernel = Literal["bookworm", "trixie"]
KERNELS: tuple[Kernel, ...] = ("bookworm", "trixie")

_USER_SPACE = (
    "systemd", "systemd-sysv", "dbus", "kmod", "bash", "coreutils", "util-linux", "mount",
    "procps", "python3", "runc", "busybox-static", "tar", "grep", "sed", "findutils", "login",
    "iproute2", "libpam-modules", "libnss-systemd",
    "libstdc++6",
)  # fmt: skip
_CONTAINERD_SUITE = "forky"
_MODULES = (
    "virtio_pci", "virtio_blk", "overlay", "softdog", "bfq",
    "veth", "sch_htb", "nf_tables", "nft_socket", "nft_masq", "nft_chain_nat", "sch_ingress",
    "bonding", "8021q",
)  # fmt: skip

# Third-party packages that tests inside do not need, and that make the disk large.
_LEFT_OUT = (
    "mypy", "mypyc", "ruff", "grpc_tools", "grimp", "importlinter", "rich", "kubernetes", "pip",
    "setuptools", "_distutils_hack", "wheel", "ast_serialize", "librt", "markdown_it",
)  # fmt: skip
_PRUNED = (
    "usr/share/doc", "usr/share/man", "usr/share/locale", "usr/share/info", "usr/share/perl",
    "usr/lib/x86_64-linux-gnu/perl", "usr/lib/x86_64-linux-gnu/perl-base", "usr/share/zoneinfo",
    "usr/lib/python3.11/test", "usr/lib/python3.11/idlelib", "usr/share/bash-completion",
    "usr/lib/systemd/catalog", "usr/share/polkit-1", "usr/lib/udev",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Image:
    """What QEMU boots. `disk` is read-only for a run: QEMU keeps the changes elsewhere."""

    kernel: Path
    initramfs: Path
    disk: Path


def built(kernel: Kernel) -> Image:
    """The image with that Debian release's kernel; the first call builds it (a few minutes).

    Raises ImageError.
    """
    CACHE.mkdir(parents=True, exist_ok=True)
    with _locked(CACHE / "lock"):
        disk = _built_disk()
        boot = _built_boot(kernel)
    return Image(boot / "vmlinuz", boot / "initramfs", disk)


def _key(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]


def _say(what: str) -> None:
    print(f"vm: {what}", file=sys.stderr, flush=True)


def _built_boot(kernel: Kernel) -> Path:
    key = _key(kernel, *_MODULES, (Path(__file__).parent / "initramfs.py").read_text())
    folder = CACHE / f"boot-{kernel}-{key}"
    if folder.is_dir():
        return folder
    _say(f"fetching the kernel of Debian {kernel}")
    with _scratch() as scratch:
        package = newest_kernel_package(kernel)
        fetch((package,), kernel, scratch / "kernel", dependencies=False)
        fetch(("busybox-static",), "bookworm", scratch / "busybox", dependencies=False)
        (image,) = (scratch / "kernel/boot").glob("vmlinuz-*")
        fresh = scratch / "boot"
        fresh.mkdir()
        shutil.copy(image, fresh / "vmlinuz")
        modules = ordered_modules(scratch / "kernel", _MODULES)
        write_initramfs(fresh / "initramfs", scratch / "busybox/bin/busybox", modules)
        fresh.rename(folder)
    return folder


def _built_disk() -> Path:
    site_packages = Path(sysconfig.get_paths()["purelib"])
    distributions = sorted(path.name for path in site_packages.glob("*.dist-info"))
    sources = [(Path(__file__).parent / name).read_text() for name in ("image.py", "system.py")]
    key = _key(*_USER_SPACE, _CONTAINERD_SUITE, *distributions, *sources)
    disk = CACHE / f"disk-{key}.ext4"
    if disk.is_file():
        return disk
    if sys.version_info[:2] != (3, 11):
        raise ImageError(
            "the image shares this interpreter's packages with Debian 12's Python 3.11: "
            f"build it with Python 3.11, not {sys.version.split()[0]}"
        )
    if os.geteuid() != 0:
        raise ImageError("the image's files belong to root: build it as root")
    from tests.vm.system import write_system

    _say("building the disk: fetching Debian packages")
    with _scratch() as scratch:
        root = scratch / "root"
        root.mkdir()
        fetch(_USER_SPACE, "bookworm", root, dependencies=True)
        fetch(("containerd",), _CONTAINERD_SUITE, root, dependencies=False)
        _merge_usr(root)
        for path in _PRUNED:
            shutil.rmtree(root / path, ignore_errors=True)
        _say("building the disk: copying Python packages")
        _copy_packages(site_packages, root / "opt/site-packages")
        write_image(root / "opt/image.tar")
        write_system(root)
        for folder in ("usr/lib/python3.11", "usr/lib/python3", "opt/site-packages"):
            compile_tree(root / folder, root)
        _say("building the disk: writing the file system")
        fresh = scratch / "disk.ext4"
        write_ext4(root, fresh, spare_mib=192)
        fresh.rename(disk)
    return disk


def _merge_usr(root: Path) -> None:
    """Debian's packages still carry /bin and /lib as folders; systemd wants them inside /usr."""
    for name in ("bin", "sbin", "lib", "lib64"):
        folder = root / name
        if folder.is_symlink() or not folder.is_dir():
            continue
        shutil.copytree(folder, root / "usr" / name, symlinks=True, dirs_exist_ok=True)
        shutil.rmtree(folder)
        folder.symlink_to(f"usr/{name}")


def _copy_packages(source: Path, target: Path) -> None:
    def ignore(folder: str, names: list[str]) -> set[str]:
        skipped = {name for name in names if name in ("__pycache__", "tests", "test")}
        if Path(folder) == source:
            skipped |= {
                name
                for name in names
                if name in _LEFT_OUT or name.endswith(("-stubs", ".pth")) or name.startswith("~")
            }
        return skipped

    shutil.copytree(source, target, ignore=ignore, symlinks=True)


def compile_tree(folder: Path, root: Path) -> None:
    """Byte-compile everything, valid whatever the files' times become."""
    compileall.compile_dir(
        folder,
        quiet=2,
        stripdir=str(root),
        prependdir="/",
        invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH,
        workers=0,
    )


def write_ext4(folder: Path, target: Path, *, spare_mib: int) -> None:
    """Make a file system image with the folder's content and some room."""
    if shutil.which("mke2fs") is None:
        raise ImageError("mke2fs is not installed: apt-get install e2fsprogs")
    used = sum(-(-path.lstat().st_size // 4096) * 4096 + 512 for path in folder.rglob("*"))
    size_mib = used * 11 // 10 // (1 << 20) + spare_mib
    command = [
        "mke2fs", "-q", "-t", "ext4", "-m", "0", "-N", "65536",
        "-d", str(folder), str(target), f"{size_mib}M",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    if done.returncode != 0:
        raise ImageError(f"mke2fs failed ({done.returncode}):\n{done.stderr[-2000:]}")


def write_payload(target: Path, session: str) -> None:
    """Write the disk of one run: the checkout's files, compiled, and the session's description."""
    root = Path(_compiled_checkout().name) / "payload"
    (root / "vm-session.json").write_text(session)
    write_ext4(root, target, spare_mib=64)


@functools.cache
def _compiled_checkout() -> tempfile.TemporaryDirectory[str]:
    """The same for all runs of this process, and gone with it: to compile takes some seconds."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=CHECKOUT,
        capture_output=True,
        check=True,
        timeout=60,
    ).stdout.decode()
    CACHE.mkdir(parents=True, exist_ok=True)
    folder = tempfile.TemporaryDirectory(dir=CACHE, prefix="scratch-")
    root = Path(folder.name) / "payload"
    root.mkdir()
    for name in filter(None, listed.split("\0")):
        source = CHECKOUT / name
        if source.is_file():
            place = root / name
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, place)
    for path in root.iterdir():
        if path.is_dir():
            compile_tree(path, root)
    return folder


@contextmanager
def _scratch() -> Iterator[Path]:
    """A folder on the cache's own file system, so that a finished part is moved in one step."""
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE, prefix="scratch-") as folder:
        yield Path(folder)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
