"""Compile the programs of a generation ahead of time."""
