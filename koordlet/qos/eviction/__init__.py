"""Evictions: a round of victims, and the evictor that ends their pods."""
