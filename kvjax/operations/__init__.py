"""Functions from caches to caches, except for writing tokens."""
