"""The embedded model: its files, and the recipe that made them from text every CPython carries."""
