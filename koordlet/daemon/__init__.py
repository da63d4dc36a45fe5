"""The daemon put together: its parts, what feeds them, when passes run, and what it serves."""
