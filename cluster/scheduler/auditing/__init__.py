"""What becomes of workloads until they are scheduled, as upstream's workload auditor counts it."""
