"""Searches for the likeliest texts."""
