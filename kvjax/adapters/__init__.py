"""Models and training loops of other libraries; import the adapter of a framework by name."""
