"""The transports by which hooks arrive: NRI, and the hook service for the runtime proxy."""
