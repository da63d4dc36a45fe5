"""Exact allocation on one node: CPUs, NUMA nodes, devices. Pure functions over plain values."""
