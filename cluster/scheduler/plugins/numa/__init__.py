"""NodeNUMAResource: CPUs of a pod's own and amounts by NUMA node."""
