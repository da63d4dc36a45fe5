"""Tests of the QoS strategies: control laws as tables, invariants as properties."""
