"""CRI v1, spoken by containerd since 1.6 and by CRI-O since 1.20."""
