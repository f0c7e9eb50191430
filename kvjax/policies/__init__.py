"""Cache policies, and what they need from a model's config."""

from kvjax.policies.cache_policy import Hybrid
from kvjax.policies.presets import Auto, Edges, transformers_policy

__all__ = ["Auto", "Edges", "Hybrid", "transformers_policy"]
