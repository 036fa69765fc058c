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
    """Calls of one of our functions in a host program.

    Args:
        handed_back: those that the host's own function answered.
        last_reason: why, of the last of these.
    """

    calls: int = 0
    handed_back: int = 0
    last_reason: str = ""

    def hand_back(self, reason: str) -> None:
        """Count a call that the host's own function answers."""
        self.handed_back += 1
        self.last_reason = reason


def summary(host: str, counts: Mapping[str, Counts]) -> str:
    """Return one line: calls taken and handed back by function, and functions never called.

    Args:
        host: name and version of the host program.
        counts: counts of each function that replaces one of the host's.

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
class Function:
    """One function of a host program.

    Args:
        state: "replaced", "kept" (the host's own, see `why`) or "absent" from this version.
        why: why it is not replaced, or what the replacement leaves to the host.
        counts: counts of the replacement in this process.
    """

    name: str
    state: str
    why: str = ""
    counts: Counts = field(default_factory=Counts)


@dataclass(frozen=True, slots=True)
class HostReport:
    """What is replaced in a host program, and how often it was called in this process.

    Args:
        functions: one for each that this package knows.
    """

    host: str
    functions: tuple[Function, ...]

    def __getitem__(self, name: str) -> Function:
        """Return a function by name; KeyError if there is none."""
        for function in self.functions:
            if function.name == name:
                return function
        raise KeyError(name)

    def names(self, state: str) -> list[str]:
        return [function.name for function in self.functions if function.state == state]

    def summary(self) -> str:
        """Return one line about the calls."""
        used = [one for one in self.functions if one.state == "replaced" or one.counts.calls]
        return summary(self.host, {one.name: one.counts for one in used})

    def __str__(self) -> str:
        """Return a table for people."""
        width = max(len(one.name) for one in self.functions)
        lines = [f"skyrl_fast in {self.host}"]
        for one in self.functions:
            details = [one.why] if one.why else []
            if one.counts.calls:
                back = f", {one.counts.handed_back} by the host" if one.counts.handed_back else ""
                details.insert(0, f"{one.counts.calls} calls{back}")
            lines.append(f"  {one.name:<{width}}  {one.state:<8}  {'; '.join(details)}".rstrip())
        return "\n".join(lines)
