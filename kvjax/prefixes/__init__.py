"""Beginnings of texts that requests share: pages that are kept, found again, and lent."""
