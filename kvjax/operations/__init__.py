"""Functions from caches to caches, besides writing tokens."""
