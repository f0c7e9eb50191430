"""Knowing beforehand what fits: bytes, operations, limits, shapes of models."""
