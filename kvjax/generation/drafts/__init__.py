"""Speculative decoding: draft tokens are proposed, then verified several at a time."""
