"""The report of `install`: one row for each function of SkyRL."""

from __future__ import annotations

from dataclasses import dataclass, field


class SkyRLFastWarning(UserWarning):
    """Some of SkyRL's functions could not be replaced; the message names them."""


@dataclass(frozen=True, slots=True)
class Row:
    """One function of SkyRL.

    Args:
        name: function, or `Class.method`.
        state: "replaced", "kept" (SkyRL's own, see `why`), or "absent" from this version.
        why: why it was kept, or the fixed rules that it follows.
        version: first version with the source that was found; "" if the source is unknown.
        places: where the name was bound to the replacement: `module.name`.
        calls, handed_back: calls of the replacement, and those that SkyRL's own function answered.
        last_reason: reason of the last of these.
    """

    name: str
    state: str
    why: str = ""
    version: str = ""
    places: tuple[str, ...] = ()
    calls: int = 0
    handed_back: int = 0
    last_reason: str = ""


@dataclass(frozen=True, slots=True)
class Report:
    """The replaced functions of this process.

    Args:
        mode: "compat", "fixed", or "" where nothing is installed.
    """

    mode: str
    version: str
    rules: tuple[str, ...] = ()
    rows: tuple[Row, ...] = field(default=())

    def row(self, name: str) -> Row:
        """Return the row of a function.

        Raises:
            KeyError: there is none of this name.
        """
        for row in self.rows:
            if row.name == name:
                return row
        raise KeyError(name)

    def names(self, state: str) -> list[str]:
        """Return the names of the functions in a state, in order."""
        return [row.name for row in self.rows if row.state == state]

    def __str__(self) -> str:
        """Return a table for people; once a function was called, it shows those never called."""
        if not self.mode:
            return "skyrl_fast is not installed in SkyRL"
        rules = f", rules {', '.join(self.rules)}" if self.rules else ""
        replaced = f"{len(self.names('replaced'))} functions replaced"
        lines = [f"skyrl_fast in SkyRL {self.version}, mode {self.mode}{rules}: {replaced}"]
        any_called = any(row.calls for row in self.rows)
        width = max(len(row.name) for row in self.rows)
        for row in self.rows:
            details = [f"in {len(row.places)} places"] if row.places else []
            if row.calls:
                details.append(f"{row.calls - row.handed_back} calls")
            elif any_called and row.state == "replaced":
                details.append("never called")
            if row.handed_back:
                details.append(f"{row.handed_back} by SkyRL itself ({row.last_reason})")
            details += [row.why] if row.why else []
            lines.append(f"  {row.name:<{width}}  {row.state:<8}  {'; '.join(details)}".rstrip())
        return "\n".join(lines)
