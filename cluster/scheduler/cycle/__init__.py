"""From the queue to a decision, without any I/O; the time is passed in."""
