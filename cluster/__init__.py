"""The side of the cluster: koord-manager with its controllers and webhooks."""
