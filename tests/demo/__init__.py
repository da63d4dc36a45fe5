"""The demo, as far as it can be tested without a runtime."""
