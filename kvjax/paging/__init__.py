"""Which pages of a pool rows have: taken, shared, given back."""
