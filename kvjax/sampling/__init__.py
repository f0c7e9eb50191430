"""Sampling of tokens from logits: penalties, filters, draws and scores."""
