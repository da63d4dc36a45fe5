"""What a user sees first: a daemon, a real containerd and a few pods, shown side by side.

Runs from a checkout (`make demo`); it stands on the same beds as the tests.
"""
