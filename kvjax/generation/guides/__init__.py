"""Texts that keep to a grammar."""
