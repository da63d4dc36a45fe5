"""Dynamic QoS: strategies that look at measurements, their claims, and evictions."""
