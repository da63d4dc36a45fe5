"""The configuration of the disk's Debian: users, units, containerd.

The machine boots to `koord.target`: journald, D-Bus, containerd, and one session that runs what the
payload disk says and powers the machine off.
"""

from __future__ import annotations

from pathlib import Path

_PASSWD = """root:x:0:0:root:/root:/bin/bash
messagebus:x:101:101::/nonexistent:/usr/sbin/nologin
systemd-network:x:998:998::/:/usr/sbin/nologin
systemd-journal:x:997:997::/:/usr/sbin/nologin
nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin
"""
_GROUP = """root:x:0:
tty:x:5:
disk:x:6:
utmp:x:43:
kmem:x:15:
messagebus:x:101:
systemd-network:x:998:
systemd-journal:x:997:
nogroup:x:65534:
"""

_TARGET = """[Unit]
Description=Test session
Requires=basic.target dbus.service koord-session.service
After=basic.target dbus.service
AllowIsolate=yes
"""

_SESSION = """[Unit]
Description=Runs what the payload disk says
After=dbus.service containerd.service basic.target
Wants=containerd.service
OnFailure=koord-failed.service

[Service]
Type=oneshot
WorkingDirectory=/checkout
Environment=PYTHONPATH=/checkout:/opt/site-packages HOME=/root LANG=C.UTF-8
Environment=PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin
ExecStart=/usr/bin/python3 -m tests.vm.session
# The tests make groups below this unit's own: systemd must leave them alone.
Delegate=yes
TimeoutStartSec=infinity
StandardOutput=tty
StandardError=tty
TTYPath=/dev/ttyS0
"""

_FAILED = """[Unit]
Description=Says that the session did not run

[Service]
Type=oneshot
StandardOutput=tty
TTYPath=/dev/ttyS0
ExecStart=/bin/sh -c 'echo "KOORD-VM: failed: the session unit failed"; \\
    journalctl -b -n 40 --no-pager; systemctl poweroff -ff'
"""

_CONTAINERD = """[Unit]
Description=containerd
After=dbus.service local-fs.target

[Service]
Type=notify
ExecStart=/usr/bin/containerd
Delegate=yes
KillMode=process
Restart=always
RestartSec=1
OOMScoreAdjust=-999
TasksMax=infinity
"""

_CONTAINERD_CONFIG = """version = 3
disabled_plugins = [
  "io.containerd.snapshotter.v1.btrfs", "io.containerd.snapshotter.v1.zfs",
  "io.containerd.snapshotter.v1.devmapper", "io.containerd.snapshotter.v1.erofs",
  "io.containerd.snapshotter.v1.blockfile", "io.containerd.tracing.processor.v1.otlp",
]

[plugins."io.containerd.cri.v1.images".pinned_images]
sandbox = "koord.test/pause:1"

[plugins."io.containerd.cri.v1.runtime"]
disable_apparmor = true

[plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"

[plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc.options]
SystemdCgroup = true

[plugins."io.containerd.nri.v1.nri"]
disable = false
"""

# What `pip install` would put there; the code is on the payload disk.
_COMMAND = """#!/usr/bin/python3
import sys
sys.path[:0] = ["/checkout", "/opt/site-packages"]
from {module} import main
sys.exit(main())
"""
_COMMANDS = {
    "koordlet": "koordlet.main",
    "koordctl": "koordctl.main",
    "koord-runtime-proxy": "runtime_proxy.main",
}

# Units that only cost time here.
_MASKED = (
    "systemd-udevd.service", "systemd-udev-trigger.service", "systemd-udevd-control.socket",
    "systemd-udevd-kernel.socket", "systemd-hwdb-update.service", "systemd-timesyncd.service",
    "systemd-networkd.service", "systemd-resolved.service", "systemd-logind.service",
    "systemd-random-seed.service", "systemd-update-utmp.service", "systemd-pstore.service",
    "systemd-boot-update.service", "systemd-firstboot.service", "systemd-sysusers.service",
    "systemd-ask-password-console.path", "systemd-ask-password-wall.path", "getty.target",
    "systemd-modules-load.service", "sys-kernel-debug.mount", "sys-kernel-tracing.mount",
    "systemd-machine-id-commit.service", "systemd-journal-flush.service", "e2scrub_reap.service",
    "systemd-binfmt.service", "proc-sys-fs-binfmt_misc.automount", "dev-hugepages.mount",
    "dev-mqueue.mount", "systemd-remount-fs.service", "systemd-network-generator.service",
    "kmod-static-nodes.service",
)  # fmt: skip


def write_system(root: Path) -> None:
    """Write the configuration into the tree of the disk."""
    files = {
        "etc/passwd": _PASSWD,
        "etc/group": _GROUP,
        "etc/hostname": "koord-vm\n",
        "etc/hosts": "127.0.0.1 localhost koord-vm\n",
        "etc/machine-id": "0123456789abcdef0123456789abcdef\n",
        "etc/os-release": 'ID=debian\nVERSION_ID="12"\nPRETTY_NAME="Debian for tests"\n',
        "etc/fstab": "",
        "etc/resolv.conf": "nameserver 127.0.0.1\n",
        "etc/nsswitch.conf": "passwd: files systemd\ngroup: files systemd\nhosts: files\n",
        "etc/containerd/config.toml": _CONTAINERD_CONFIG,
        "etc/systemd/journald.conf": "[Journal]\nStorage=volatile\nForwardToConsole=no\n",
        "etc/systemd/system.conf": "[Manager]\nDefaultTimeoutStartSec=90s\n",
        "etc/systemd/system/koord.target": _TARGET,
        "etc/systemd/system/koord-session.service": _SESSION,
        "etc/systemd/system/koord-failed.service": _FAILED,
        "etc/systemd/system/containerd.service": _CONTAINERD,
    }
    for name, content in files.items():
        place = root / name
        place.unlink(missing_ok=True)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(content)
    (root / "opt/koordinator/bin").mkdir(parents=True)
    for name, module in _COMMANDS.items():
        command = root / "opt/koordinator/bin" / name
        command.write_text(_COMMAND.format(module=module))
        command.chmod(0o755)
    for unit in _MASKED:
        link = root / "etc/systemd/system" / unit
        link.unlink(missing_ok=True)
        link.symlink_to("/dev/null")
    folders = (
        "proc",
        "sys",
        "dev",
        "run",
        "tmp",
        "root",
        "checkout",
        "var/log",
        "var/lib/koordlet",
    )
    for folder in folders:
        (root / folder).mkdir(parents=True, exist_ok=True)
    run = root / "var/run"
    if not run.exists() and not run.is_symlink():
        run.symlink_to("/run")
    (root / "etc/mtab").unlink(missing_ok=True)
    (root / "etc/mtab").symlink_to("/proc/self/mounts")
