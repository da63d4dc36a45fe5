"""koord-manager: the controllers that feed the nodes."""
