"""Speculative decoding: draft tokens are proposed, and then verified several at a time."""
