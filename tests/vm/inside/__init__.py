"""Tests that run inside the virtual machine: systemd, containerd and cgroup v2 for real."""
