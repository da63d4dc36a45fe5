"""Admission: what pods, quotas, nodes and configuration may become."""
