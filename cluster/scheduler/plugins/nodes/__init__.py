"""What a node is like: taints, labels, ports in use, images."""
