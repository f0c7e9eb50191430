"""Generation inside a training loop, as one program with fixed shapes."""

from kvjax.rollouts.results import Rollout

__all__ = ["Rollout"]
