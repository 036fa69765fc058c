"""The fixed rules: where SkyRL departs from the contract, and what is done instead."""

from __future__ import annotations

from dataclasses import dataclass

from skyrl_fast.integrations.skyrl.names import Target


@dataclass(frozen=True, slots=True)
class Rule:
    """One switchable rule.

    Args:
        name: for `install(rules=...)`.
        target: what of SkyRL it replaces.
        stand_in: `module.function` of this package.
        today: what SkyRL does.
        instead: what happens with the rule, by the contract.
        upstream: SkyRL's issue or pull request about it; "" where none is known.
    """

    name: str
    target: Target
    stand_in: str
    today: str
    instead: str
    upstream: str = ""


TARGETS: tuple[Target, ...] = ()
RULES: tuple[Rule, ...] = ()
