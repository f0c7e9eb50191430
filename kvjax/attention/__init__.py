"""Attention of queries to a cache."""
