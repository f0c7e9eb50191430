"""Pallas kernels for accelerators. They are imported when they are first used."""
