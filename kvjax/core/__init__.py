"""Helpers that every other folder may use."""
