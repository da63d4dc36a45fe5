"""A machine to test on that most build machines are not: cgroup v2, systemd, sockets and threads.

`python -m tests.vm --help` builds its image from Debian packages, boots it under QEMU's software
emulation, runs a pytest selection inside and brings the results back. See docs/testing.md.
"""
