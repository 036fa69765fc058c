"""SkyRL's other names of settings: each idea has one setting here, which they choose."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from skyrl_fast.setting import ConfigError

STEP_WISE = "generator.step_wise_trajectories"
MERGE = "generator.merge_stepwise_output"
MULTI_TURN = "generator.use_conversation_multi_turn"
LOCAL_ENGINES = "generator.inference_engine.run_engines_locally"
PROMPT_LENGTH = "trainer.max_prompt_length"


@dataclass(frozen=True, slots=True)
class Meaning:
    """What SkyRL's names say of a setting.

    Args:
        value: of the setting where it is not given itself; None: its default.
        allows: whether a given value agrees.
        expected: the values that agree, in words.
    """

    value: Any
    allows: Callable[[Any], bool]
    expected: str


@dataclass(frozen=True, slots=True)
class Alias:
    """Names of SkyRL that choose the value of one setting here.

    Args:
        names: SkyRL's dotted keys.
        kind: type of their values.
        setting: the dotted key here.
        meaning: called with the values that are given, by name.
        about: clause for the documentation.
    """

    names: tuple[str, ...]
    kind: type
    setting: str
    meaning: Callable[[Mapping[str, Any]], Meaning]
    about: str


def _one_of(*values: str) -> Meaning:
    return Meaning(values[0], lambda value: value in values, " or ".join(values))


def _rows(given: Mapping[str, Any]) -> Meaning:
    is_step_wise = given.get(STEP_WISE)
    merges = given.get(MERGE)
    if is_step_wise is False and merges:
        raise ConfigError(
            f"{MERGE}: expected false with {STEP_WISE}=false, as the turns of a trajectory are one "
            "row already, got true"
        )
    if is_step_wise is False:
        return _one_of("trajectory")
    if merges:
        return _one_of("merged")
    if merges is None:
        return _one_of("step", "merged")
    if is_step_wise:
        return _one_of("step")
    return _one_of("step", "trajectory")


def _context(given: Mapping[str, Any]) -> Meaning:
    if given[MULTI_TURN]:
        return _one_of("append", "retemplate", "compact")
    return _one_of("single")


def _server_urls(given: Mapping[str, Any]) -> Meaning:
    if given[LOCAL_ENGINES]:
        return Meaning(None, lambda urls: not urls, "none")
    return Meaning([], bool, "at least one address")


def _prompt_length(given: Mapping[str, Any]) -> Meaning:
    # SkyRL has both: the longest first prompt, and the longest of any turn.
    return Meaning(given[PROMPT_LENGTH], lambda length: True, "any length")


ALIASES = (
    Alias(
        (STEP_WISE, MERGE),
        bool,
        "trainer.rows",
        _rows,
        "true alone: step; with merging: merged; false: trajectory",
    ),
    Alias(
        (MULTI_TURN,),
        bool,
        "generator.context",
        _context,
        "true: append, retemplate or compact; false: single",
    ),
    Alias(
        (PROMPT_LENGTH,),
        int,
        "generator.max_input_length",
        _prompt_length,
        "where generator.max_input_length is not given",
    ),
    Alias(
        (LOCAL_ENGINES,),
        bool,
        "generator.inference_engine.external_server_urls",
        _server_urls,
        "true: no address; false: at least one",
    ),
)
ALIAS_TYPES = {name: alias.kind for alias in ALIASES for name in alias.names}


def resolve_aliases(
    sections: dict[str, Any], convert: Callable[[type, Any, str], Any]
) -> dict[str, Any]:
    """Replace SkyRL's names in nested settings, in place, and return them.

    Args:
        sections: settings by section, without dotted keys; the mappings are changed.
        convert: called with type, value and key of each; returns the value in that type.

    Raises:
        ConfigError: a name contradicts another, or the setting itself.
    """
    for alias in ALIASES:
        given: dict[str, Any] = {}
        for name in alias.names:
            section = _section(sections, name)
            key = name.rpartition(".")[2]
            if section is not None and key in section:
                given[name] = convert(alias.kind, section.pop(key), name)
        if given:
            _set(sections, alias, given)
    return sections


def _set(sections: dict[str, Any], alias: Alias, given: Mapping[str, Any]) -> None:
    meaning = alias.meaning(given)
    section = _section(sections, alias.setting, create=True)
    if section is None:
        return  # no mapping, which is refused later
    key = alias.setting.rpartition(".")[2]
    value = section.get(key)
    if value is None:
        value = meaning.value
    if not meaning.allows(value):
        said = ", ".join(f"{name}={str(one).lower()}" for name, one in given.items())
        raise ConfigError(
            f"{alias.setting}: expected {meaning.expected} with {said}, got {value!r}"
        )
    if value is None:
        section.pop(key, None)
    else:
        section[key] = value


def _section(sections: dict[str, Any], name: str, *, create: bool = False) -> dict[str, Any] | None:
    """Return the mapping that holds a dotted key, or None where there is no such mapping."""
    section: Any = sections
    for part in name.split(".")[:-1]:
        if create and section.get(part) is None:
            section[part] = {}
        section = section.get(part)
        if not isinstance(section, dict):
            return None
    return section
