"""Continuous batching: many requests in the rows of one cache."""

from kvjax.engine.engine import Engine
from kvjax.engine.handle import Handle
from kvjax.engine.results import EngineStats
from kvjax.engine.service import Service

__all__ = ["Engine", "EngineStats", "Handle", "Service"]
