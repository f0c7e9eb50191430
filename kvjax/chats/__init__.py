"""Many turns on one cache."""

from kvjax.chats.chat import Chat
from kvjax.chats.turns import ChatStats, Turn

__all__ = ["Chat", "ChatStats", "Turn"]
