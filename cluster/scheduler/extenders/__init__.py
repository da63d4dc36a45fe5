"""Extenders: webhooks that filter, rank, bind and preempt pods besides the plugins."""
