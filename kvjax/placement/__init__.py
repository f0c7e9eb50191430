"""Placement of arrays: on a device, on the host, over a mesh, within a budget."""
