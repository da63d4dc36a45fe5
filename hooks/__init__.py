"""Subjects, claims, the engine that decides, and the policies that claim. Pure."""
