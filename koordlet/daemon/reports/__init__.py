"""Reports in the daemon: what they are made from, and their loops."""
