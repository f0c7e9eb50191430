"""A model that remembers facts: its files, its task, and the recipe that trained it."""

from pathlib import Path

FOLDER = Path(__file__).parent
"""The checkpoint, as ``kvjax.models.load`` takes it."""
