"""Policies as the command line has them: ``NAME,SETTING=VALUE,...``."""

import inspect
from typing import Any

from kvjax.policies.presets import PolicyChoice, policy


def parse_policy(words: str, **more: Any) -> PolicyChoice:
    """A policy from words: ``bits=4``, ``sliding_window,window=128,bits=8``.

    Args:
      words: a name, by default ``static``, and settings of ``kvjax.policy``.
      more: further settings; None is none.

    Raises:
      ValueError: if a setting is not one of ``kvjax.policy`` or is given twice; for two names.
    """
    names: list[str] = []
    settings: dict[str, Any] = {}
    for part in words.split(","):
        setting, equals, value = (piece.strip() for piece in part.partition("="))
        if setting in settings or (names and not equals):
            twice = f"{setting} twice" if equals else f"two names, {names[0]} and {setting}"
            raise ValueError(f"the policy {words!r} has {twice}: two policies are given one by one")
        if not equals:
            names.append(setting)
        else:
            settings[setting] = int(value) if value.lstrip("-").isdigit() else value
    name = names[0] if names else "static"
    for setting, value in more.items():
        if value is not None and settings.setdefault(setting, value) != value:
            raise ValueError(
                f"{setting} is {settings[setting]} in {words!r}, and {value} beside it"
            )
    known = [name for name in inspect.signature(policy).parameters if name != "name"]
    if unknown := [setting for setting in settings if setting not in known]:
        raise ValueError(
            f"the policy {words!r} has {unknown[0]!r}: settings are {', '.join(known)}"
        )
    return policy(name, **settings)
