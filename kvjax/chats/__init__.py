"""Conversations of many turns on one cache."""

from kvjax.chats.chat import Chat, ChatStats
from kvjax.chats.rendering import Turn

__all__ = ["Chat", "ChatStats", "Turn"]
