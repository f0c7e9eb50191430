"""Other people's models and training loops; adapters of frameworks are imported by name."""
