"""Text of models and environments as it may be printed on a terminal or written to a log."""

from __future__ import annotations

import logging
import re

MAX_FAILURE = 10_000  # characters of an error that are kept
MAX_LOGGED = 1_000  # characters of a text in one line of a log

# Control characters, which move the cursor, change the screen or write to the clipboard, and
# characters that are invisible, divide lines or change the direction of text. Not newlines, tabs.
INVISIBLE = (
    "\x7f-\x9f\u00ad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f"
    "\ud800-\udfff\ufeff\ufff9-\ufffb\U000e0000-\U000e007f"
)
_UNSAFE = re.compile(f"[\x00-\x08\x0b-\x1f{INVISIBLE}]")


def shorten(text: str, limit: int) -> str:
    """Return the text, or its first `limit` characters and how many are left out.

    Example:
        >>> shorten("abcdef", 4)
        'abcd ... (2 more characters)'
    """
    more = len(text) - limit
    if more <= 0:
        return text
    return f"{text[:limit]} ... ({more} more characters)"


def printable(text: str, limit: int | None = None) -> str:
    r"""Return the text with unsafe characters as escapes; newlines and tabs stay.

    Args:
        limit: longest text in characters; None: any.

    Example:
        >>> printable("a\x1b[2Jb\r")
        'a\\x1b[2Jb\\r'
    """
    if limit is not None:
        text = shorten(text, limit)
    return _UNSAFE.sub(lambda match: ascii(match[0])[1:-1], text)


def log_line(text: object) -> str:
    r"""Return the text for one line of a log: cut to MAX_LOGGED, newlines as `\n`."""
    return printable(str(text), MAX_LOGGED).replace("\n", "\\n")


class PrintableFormatter(logging.Formatter):
    """Formatter of log records whose output is `printable`, exceptions included."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))
