"""Elastic quotas: trees of quotas, what their pods request and use, and what each may use now."""
