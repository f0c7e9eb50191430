"""The commands of a chat by name, and what they show."""

from collections.abc import Sequence
from typing import Any

from kvjax.chats.rendering import Turn
from kvjax.cli.output import by_place, table

COMMANDS = {
    "help": ("", "this list"),
    "show": ("", "the turns, numbered"),
    "edit": ("[N] TEXT", "go back to before turn N, by default the last, and ask TEXT instead"),
    "retry": ("", "answer the last turn anew, with another seed"),
    "undo": ("", "take the last turn back"),
    "system": ("[TEXT]", "show the system prompt, or have another one; - for none"),
    "save": ("FOLDER", "keep the chat and its cache there"),
    "load": ("FOLDER", "go on with the chat that is there, in place of this one"),
    "stats": ("", "tokens read, known and generated, seconds, bytes, room"),
    "exit": ("", "leave, as Ctrl-D does"),
}
HELP = "\n".join(
    [
        *(f"/{f'{name} {takes}':<17}{what}" for name, (takes, what) in COMMANDS.items()),
        "//TEXT            ask a text that begins with a slash",
    ]
)


def split(line: str) -> tuple[str | None, str]:
    """A command's name, None for a text that is asked, and the rest of the line.

    Raises:
      ValueError: if there is no such command, or it takes nothing and is given something.
    """
    if line.startswith("//") or not line.startswith("/"):
        return None, line.removeprefix("/")
    name, _, rest = line[1:].partition(" ")
    name, rest = name.strip(), rest.strip()
    if name not in COMMANDS:
        known = ", ".join(f"/{each}" for each in COMMANDS)
        raise ValueError(
            f"there is no command /{name}: there are {known}; //{name} asks it as a text"
        )
    if rest and not COMMANDS[name][0]:
        raise ValueError(f"/{name} takes nothing behind it")
    return name, rest


def turns_shown(turns: Sequence[Turn], system: str | None) -> str:
    """Turns to be read, numbered; those that the model sees no more are said to be so."""
    lines = [] if system is None else [f"system: {system}"]
    first = turns[-1].first if turns else 0
    for number, turn in enumerate(turns):
        dropped = " (dropped)" if number < first else ""
        lines += [f"{number + 1}{dropped} > {turn.user}", turn.answer]
    return "\n".join(lines) or "(there is no turn yet)"


def stats_table(stats: dict[str, Any]) -> str:
    """A chat's figures, a line each."""
    found = {name: round(x, 2) if isinstance(x, float) else x for name, x in stats.items()}
    found["room"] = "no end" if stats["room"] is None else stats["room"]
    found["cache_bytes"] = by_place(stats["cache_bytes"]) or "none"
    return table(found)
