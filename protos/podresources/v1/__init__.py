"""The part of version 1 that koordlet adds to."""
