"""The ways in which a runtime asks the daemon: NRI, and the hook service of the runtime proxy."""
