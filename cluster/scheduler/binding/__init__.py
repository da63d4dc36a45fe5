"""What the scheduler writes to the API server: bindings, conditions, events, reservations."""
