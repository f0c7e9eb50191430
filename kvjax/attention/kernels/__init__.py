"""Attention by kernels for accelerators: asked for by name, and loaded only then."""
