"""Logits to tokens: penalties, filters, draws and scores."""
