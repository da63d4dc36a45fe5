"""What the room on a node says of a pod: requests against what is left, and measured load."""
