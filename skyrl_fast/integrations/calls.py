"""How often a host program called our functions, and a line about it when its process ends."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

_at_exit: set[Callable[[], str]] = set()


@dataclass(slots=True)
class Counts:
    """Calls of one of our functions; `handed_back` are those that the host's own one answered."""

    calls: int = 0
    handed_back: int = 0
    last_reason: str = ""

    def hand_back(self, reason: str) -> None:
        self.handed_back += 1
        self.last_reason = reason


def summary(host: str, counts: Mapping[str, Counts]) -> str:
    """Return one line: calls taken and handed back by function, and functions never called.

    Example:
        >>> summary("TRL 1.16.0", {"f": Counts(3), "g": Counts(1, 1, "on a GPU")})
        'skyrl_fast in TRL 1.16.0: 3 calls: f 3; 1 by TRL itself: g 1 (on a GPU)'
    """
    if not counts:
        return f"skyrl_fast in {host}: no function is replaced"
    taken = {name: one.calls - one.handed_back for name, one in counts.items()}
    parts = [f"{sum(taken.values())} calls"]
    if any(taken.values()):
        parts[0] += ": " + ", ".join(f"{name} {n}" for name, n in taken.items() if n)
    back = {name: one for name, one in counts.items() if one.handed_back}
    if back:
        total = sum(one.handed_back for one in back.values())
        each = ", ".join(f"{n} {one.handed_back} ({one.last_reason})" for n, one in back.items())
        parts.append(f"{total} by {host.split()[0]} itself: {each}")
    never = [name for name, one in counts.items() if not one.calls]
    if never:
        parts.append("never called: " + ", ".join(never))
    return f"skyrl_fast in {host}: " + "; ".join(parts)


def print_at_exit(line: Callable[[], str]) -> None:
    """Print a line on standard error when this process ends; "": nothing. Once per function."""
    if line not in _at_exit:
        _at_exit.add(line)
        pid = os.getpid()

        def write() -> None:
            if os.getpid() == pid and (text := line()):  # not in a forked child
                sys.stderr.write(text + "\n")

        atexit.register(write)


@dataclass(frozen=True, slots=True)
class Row:
    """One function of a host program.

    Args:
        state: "replaced", "kept" (the host's own, see `why`) or "absent" from this version.
        why: why it is not replaced, or what the replacement leaves to the host.
        version: first version with the source that was found; "" where sources are not compared.
        places: where the name was bound to the replacement: `module.name`.
    """

    name: str
    state: str
    why: str = ""
    counts: Counts = field(default_factory=Counts)
    version: str = ""
    places: tuple[str, ...] = ()

    def describe(self, host: str, *, any_called: bool) -> str:
        counts = self.counts
        details = []
        if self.places:
            details.append(f"in {len(self.places)} places")
        if counts.calls:
            details.append(f"{counts.calls - counts.handed_back} calls")
        elif any_called and self.state == "replaced":
            details.append("never called")
        if counts.handed_back:
            details.append(f"{counts.handed_back} by {host} itself ({counts.last_reason})")
        return "; ".join([*details, *filter(None, [self.why])])


@dataclass(frozen=True, slots=True)
class Report:
    """What is replaced in a host program, and how often it was called in this process.

    Args:
        host: name and version of the host program.
        rows: one for each function that this package knows.
        mode: of SkyRL's `install`; "" where nothing is installed in it.
    """

    host: str
    rows: tuple[Row, ...] = ()
    mode: str = ""

    def row(self, name: str) -> Row:
        """Return the row of a function; KeyError if there is none of this name."""
        for row in self.rows:
            if row.name == name:
                return row
        raise KeyError(name)

    def names(self, state: str) -> list[str]:
        return [row.name for row in self.rows if row.state == state]

    def summary(self) -> str:
        used = [row for row in self.rows if row.state == "replaced" or row.counts.calls]
        return summary(self.host, {row.name: row.counts for row in used})

    def __str__(self) -> str:
        """Return a table for people; once a function was called, it shows those never called."""
        if not self.rows and not self.mode:
            return f"skyrl_fast is not installed in {self.host}"
        if self.mode:
            mode = f", mode {self.mode}"
        else:
            mode = ""
        replaced = f"{len(self.names('replaced'))} functions replaced"
        lines = [f"skyrl_fast in {self.host}{mode}: {replaced}"]
        any_called = any(row.counts.calls for row in self.rows)
        width = max((len(row.name) for row in self.rows), default=0)
        for row in self.rows:
            details = row.describe(self.host.split()[0], any_called=any_called)
            lines.append(f"  {row.name:<{width}}  {row.state:<8}  {details}".rstrip())
        return "\n".join(lines)
