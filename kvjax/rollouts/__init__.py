"""Generation inside a training loop: fixed shapes, one program."""

from kvjax.rollouts.results import Rollout

__all__ = ["Rollout"]
