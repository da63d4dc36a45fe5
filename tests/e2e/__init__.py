"""End to end: the daemon on real runtimes."""
