"""What the daemon serves: admin socket, metrics, health and the hook service."""
