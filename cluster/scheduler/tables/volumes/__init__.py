"""Claims, persistent volumes and what is attached to nodes."""
