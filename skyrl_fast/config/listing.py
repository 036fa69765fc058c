"""All settings as text, with default, limits and help."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from dataclasses import Field
from typing import Any

from skyrl_fast.config.aliases import ALIASES
from skyrl_fast.config.settings import Config, leaves
from skyrl_fast.config.skyrl_settings import SKYRL_ONLY

_WIDTH = 96


def setting_entries() -> Iterator[str]:
    """Yield the text of each setting, of SkyRL's other names, and of what only SkyRL has."""
    for name, default, item in leaves(Config()):
        yield _entry(f"{name} = {shown(default)}", description(item))
    for alias in ALIASES:
        for name in alias.names:
            yield _entry(f"{name} (SkyRL)", f"chooses {alias.setting}; {alias.about}")
    for name, advice in SKYRL_ONLY.items():
        yield _entry(f"{name} (SkyRL only)", advice)


def _entry(head: str, text: str) -> str:
    body = textwrap.fill(text, _WIDTH, initial_indent="    ", subsequent_indent="    ")
    return f"{head}\n{body}\n"


def shown(value: Any) -> str:
    """Return a value in YAML notation.

    Example:
        >>> shown(None), shown(True), shown("")
        ('null', 'true', '""')
    """
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value) or '""'


def description(item: Field[Any]) -> str:
    """Return the help, choices and limits of a setting."""
    about = item.metadata
    if about.get("help"):
        parts = [about["help"]]
    else:
        parts = []
    if about.get("choices"):
        parts.append("one of " + ", ".join(about["choices"]))
    limits = {"at_least": ">=", "above": ">", "at_most": "<="}
    parts += [f"{sign} {about[k]}" for k, sign in limits.items() if about.get(k) is not None]
    return "; ".join(parts)
