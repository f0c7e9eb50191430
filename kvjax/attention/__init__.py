"""Queries against a cache: what they see, one softmax, and the paths it takes."""
