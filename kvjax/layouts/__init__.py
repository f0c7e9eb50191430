"""Layouts: which slot holds which position. Integer maths on positions, and nothing else."""

from kvjax.layouts.dense import Dense

__all__ = ["Dense"]
