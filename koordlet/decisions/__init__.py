"""The engine in force: its rules, the timing of its policies, and site policies."""
