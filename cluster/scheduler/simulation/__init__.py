"""The scheduler over a dump, or over a cluster that is only read: what would happen to pods."""
