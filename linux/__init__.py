"""The kernel, typed: what can be set, where it lives, how it reads and writes."""
