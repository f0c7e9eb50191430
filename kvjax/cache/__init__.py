"""The state of a cache, and what creates, fills and reads it."""
