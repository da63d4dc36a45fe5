"""What the node and its pods use: collectors, the store of their samples, and its aggregates."""
