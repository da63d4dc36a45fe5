"""The audit log: what the daemon changed on the node and why, on disk and page by page."""
