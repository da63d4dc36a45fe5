"""Collectors: each reads one part of the kernel or a driver and returns samples."""
