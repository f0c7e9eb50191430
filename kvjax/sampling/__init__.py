"""Logits to tokens: what may be drawn, and how."""
