"""Plugins about the volumes of pods."""
