"""The first user space: loads the disk driver and hands over to systemd on the disk."""

from __future__ import annotations

from pathlib import Path

_INIT = """#!/bin/busybox sh
# Loads the modules in order, mounts the root and becomes systemd. Every failure is said aloud:
# the host watches the console for "KOORD-VM: failed".
/bin/busybox mount -t devtmpfs dev /dev
/bin/busybox mount -t proc proc /proc
exec </dev/console >/dev/console 2>&1
fail() {{ echo "KOORD-VM: failed: $1"; /bin/busybox poweroff -f; }}
for module in {modules}; do
    /bin/busybox insmod /modules/$module.ko || fail "insmod $module"
done
tries=0
while [ ! -b /dev/vda ]; do
    tries=$((tries + 1))
    [ $tries -gt 100 ] && fail "no disk /dev/vda"
    /bin/busybox usleep 100000
done
/bin/busybox mount -t ext4 -o rw,noatime /dev/vda /root || fail "mount /dev/vda"
/bin/busybox mount -t ext4 -o rw,noatime /dev/vdb /root/checkout || fail "mount /dev/vdb"
/bin/busybox mount --move /dev /root/dev || fail "move /dev"
/bin/busybox umount /proc
exec /bin/busybox switch_root /root /lib/systemd/systemd
fail "switch_root"
"""


def write_initramfs(target: Path, busybox: Path, modules: list[tuple[str, bytes]]) -> None:
    """Write a newc cpio archive, not compressed: under emulation copying beats unpacking."""
    archive = bytearray()
    for folder in ("bin", "dev", "proc", "root", "modules"):
        archive += _entry(folder, 0o040755, b"")
    archive += _entry("bin/busybox", 0o100755, busybox.read_bytes())
    for name, content in modules:
        archive += _entry(f"modules/{name}.ko", 0o100644, content)
    names = " ".join(name for name, _ in modules)
    archive += _entry("init", 0o100755, _INIT.format(modules=names).encode())
    # The kernel opens the console for init before init can mount a /dev.
    archive += _entry("dev/console", 0o020600, b"", device=(5, 1))
    archive += _entry("TRAILER!!!", 0, b"")
    target.write_bytes(bytes(archive))


_inode = iter(range(1, 1 << 30))


def _entry(name: str, mode: int, content: bytes, *, device: tuple[int, int] = (0, 0)) -> bytes:
    fields = (
        next(_inode), mode, 0, 0, 1, 0, len(content), 0, 0, *device, len(name) + 1, 0,
    )  # fmt: skip
    head = b"070701" + b"".join(f"{field:08X}".encode() for field in fields)
    head += name.encode() + b"\0"
    head += b"\0" * (-len(head) % 4)
    return head + content + b"\0" * (-len(content) % 4)
