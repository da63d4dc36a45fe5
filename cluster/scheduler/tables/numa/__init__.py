"""CPUs and NUMA nodes of all nodes: what nodes report, what bookings hold, and what pods ask."""
