"""The metrics that Prometheus reads."""
