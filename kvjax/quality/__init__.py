"""The effect of lossy caches on predictions: measurements and reports."""
