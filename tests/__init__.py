"""Tests, mirroring the rooms they test."""
