"""Cache policies, and what they need from a model's config."""
