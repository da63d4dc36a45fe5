"""The Container Runtime Interface as a kubelet speaks it."""
