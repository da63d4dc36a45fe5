"""koord-runtime-proxy: the CRI transport between kubelet and a runtime."""
