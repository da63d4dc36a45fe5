"""What Linux does with a write, as one table, tried on the simulated kernel and on real ones."""
