"""What `install` did, name by name."""

from __future__ import annotations

from dataclasses import dataclass, field


class SkyRLFastWarning(UserWarning):
    """Some of SkyRL's functions were not replaced; the message names them."""


@dataclass(frozen=True, slots=True)
class Row:
    """One name of SkyRL's.

    Args:
        name: function, or `Class.method`.
        state: "replaced", "kept" (SkyRL's own stays, see `why`), or "absent" from this version.
        why: why it was kept, or which fixed rules it carries out.
        version: first version with the text that was found; "" where the text is unknown.
        places: where the name was bound to the replacement: `module.name`.
        calls, handed_back: calls of the stand-in, and those that SkyRL's own function answered.
        last_reason: why the last of these was handed back.
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
    """What is replaced in this process.

    Args:
        mode: "compat", "fixed", or "" where nothing is installed.
        version: of SkyRL.
        rules: fixed rules that are on.
        rows: one for each name.
    """

    mode: str
    version: str
    rules: tuple[str, ...] = ()
    rows: tuple[Row, ...] = field(default=())

    def row(self, name: str) -> Row:
        """Return the row of a name, or raise a KeyError."""
        for row in self.rows:
            if row.name == name:
                return row
        raise KeyError(name)

    def names(self, state: str) -> list[str]:
        """Return the names in a state, in order."""
        return [row.name for row in self.rows if row.state == state]

    def __str__(self) -> str:
        """Return a table for people."""
        if not self.mode:
            return "skyrl_fast is not installed in SkyRL"
        rules = f", rules {', '.join(self.rules)}" if self.rules else ""
        lines = [f"skyrl_fast in SkyRL {self.version}, mode {self.mode}{rules}"]
        width = max(len(row.name) for row in self.rows)
        for row in self.rows:
            facts = [f"in {len(row.places)} places"] if row.places else []
            facts += [f"{row.calls} calls, {row.handed_back} by SkyRL"] if row.calls else []
            facts += [row.why] if row.why else []
            lines.append(f"  {row.name:<{width}}  {row.state:<8}  {'; '.join(facts)}".rstrip())
        return "\n".join(lines)
