"""kubelet's pod resources API."""
