"""The embedded model: its files, and the recipe that trains it on CPython's documentation."""
