"""Programs that measure: each prints p50, p99 and ratios."""
