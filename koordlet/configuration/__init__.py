"""The configuration: its types, the file, upstream's flags and feature gates."""
