"""Extenders: webhooks that filter, rank and bind pods besides the plugins."""
