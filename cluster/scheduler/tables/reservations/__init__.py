"""Reservations: what is reserved where, for which pods, and how much of it is in use."""
