"""Many turns on one cache."""
