"""Accelerators as their drivers and other programs describe them."""
