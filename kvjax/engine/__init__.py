"""Continuous batching: many requests in the rows of one cache."""

from kvjax.engine.engine import Engine
from kvjax.engine.handle import Handle
from kvjax.engine.service import Service
from kvjax.engine.stats import EngineStats

__all__ = ["Engine", "EngineStats", "Handle", "Service"]
