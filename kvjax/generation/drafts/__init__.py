"""Tokens that are proposed, and checked several a pass."""
