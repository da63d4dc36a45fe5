"""Docker mode: dockerd's HTTP API instead of CRI, for kubelets with dockershim or cri-dockerd."""
