"""The composition of the daemon: its parts, their inputs, when passes run, and its endpoints."""
