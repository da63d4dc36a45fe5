"""The API server, for daemons: caches, patches, leases, events, webhook serving."""
