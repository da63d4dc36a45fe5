"""Machines to test on: each bed is a context manager that leaves nothing behind."""
