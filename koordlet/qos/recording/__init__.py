"""What the strategies saw, on disk, and the same decisions again from it."""
