"""YAML, dotted overrides and mappings to a `Config`: keys and types, but no limits."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import io
import json
import os
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from skyrl_fast.config.aliases import resolve_aliases
from skyrl_fast.config.sampling import SamplingParams
from skyrl_fast.config.settings import Config, leaves, to_dict
from skyrl_fast.config.skyrl_settings import advice_by_name, skyrl_advice
from skyrl_fast.setting import ConfigError, EnvironmentValue
from skyrl_fast.system.location import described_path
from skyrl_fast.system.printable import shorten

YAML = (".yaml", ".yml")  # endings of an override that is a file
_NEAR = 0.75  # similarity of a misspelled name, see difflib
_MAPPING, _TEXT, _NULL = (f"tag:yaml.org,2002:{kind}" for kind in ("map", "str", "null"))

# Names of TRL, verl and vLLM.
_SYNONYMS = {
    "learning_rate": "lr",
    "max_tokens": "max_generate_length",
    "max_new_tokens": "max_generate_length",
    "max_completion_length": "max_generate_length",
    "num_generations": "n_samples_per_prompt",
    "gradient_accumulation_steps": "policy_mini_batch_size",
    "per_device_train_batch_size": "train_batch_size",
    "num_train_epochs": "epochs",
    "num_iterations": "update_epochs_per_batch",
    "output_dir": "run_path",
    "save_steps": "ckpt_interval",
    "max_steps": "max_training_steps",
}

ConfigSource = Config | Mapping[str, Any] | str | os.PathLike[str]


def as_config(source: ConfigSource) -> Config:
    """Return a new `Config` from any form of settings; checks types, but no limits.

    Args:
        source: a `Config` (whose sections may be mappings), a mapping with nested or
            dotted keys, or the path of a YAML file.

    Raises:
        ConfigError: an unknown key (the message suggests the nearest one), a key given twice, or a
            value of the wrong type.

    Example:
        >>> as_config({"trainer.seed": 7, "trainer": {"epochs": 2}}).trainer.epochs
        2
    """
    if isinstance(source, (str, os.PathLike)):
        source = read_yaml(Path(source))
    if not isinstance(source, (Config, Mapping)):
        raise ConfigError(
            f"config: expected a Config, a mapping or the path of a YAML file, got {source!r}"
        )
    if isinstance(source, Mapping):
        source = resolve_aliases(_expand_dotted(Config, source, ""), _convert)
    config: Config = _build(Config, source, "")
    return config


def read_yaml(path: str | Path | None, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Return the merged sections of a file and overrides, with interpolations resolved."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    where = str(path)
    try:
        merged: Any = OmegaConf.create({})
        if path is not None:
            merged = _sections(path)
        for text in overrides:
            where = f"override {text!r}"
            if text.endswith(YAML) and "=" not in text:
                merged.merge_with(_sections(text))
                continue
            if "=" not in text or text.startswith(("=", "+", "-")):
                raise ConfigError(f"{where}: expected dotted.key=value, or another YAML file")
            merged.merge_with(_override(text))
        if path is None:
            where = "overrides"
        else:
            where = str(path)
        values: Any = OmegaConf.to_container(merged, resolve=True, throw_on_missing=True)
        written = OmegaConf.to_container(merged, resolve=False)
        if _uses_environment(written):
            values = _mark_environment_values(values, written)
    # OmegaConf raises OSError for a file that is no mapping, TypeError for a list as a section.
    except RecursionError as error:
        raise ConfigError(f"{shorten(where, 200)}: cannot be read: nested too deeply") from error
    # ValueError: a number of more digits than Python reads.
    except (OmegaConfBaseException, YAMLError, OSError, TypeError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{where}: cannot be read: {error}") from error
    assert isinstance(values, dict)
    return values


def _sections(path: str | Path) -> Any:
    import yaml
    from omegaconf import OmegaConf

    if Path(path).is_dir():
        raise ConfigError(f"expected a YAML file, got the folder {path}")
    if not Path(path).is_file():
        raise ConfigError(f"config file not found: {described_path(path)}")
    text = Path(path).read_text(encoding="utf-8")
    loaded = OmegaConf.load(io.StringIO(text))
    if not OmegaConf.is_dict(loaded):
        raise ConfigError(f"{path}: expected sections (data, trainer, ...), got a list or nothing")
    return _as_sections(loaded, yaml.compose(text, Loader=yaml.SafeLoader))


def _override(text: str) -> Any:
    """Return the sections of `dotted.key=value`, with this setting alone."""
    import yaml
    from omegaconf import OmegaConf

    key, _, value = text.partition("=")
    names = key.split(".")
    is_text = _without_none(_hint_at(Config, names)) is str
    is_quoted = value.startswith(("'", '"'))
    if is_text and not is_quoted and " #" in f" {value}":
        value = json.dumps(value, ensure_ascii=False)  # a name, no comment
    node = yaml.compose(value, Loader=yaml.SafeLoader)
    for name in reversed(names):
        item = (yaml.ScalarNode(_TEXT, name), node)
        node = yaml.MappingNode(_MAPPING, [item])
    return _as_sections(OmegaConf.from_dotlist([f"{key}={value}"]), node)


def _as_sections(loaded: Any, node: Any) -> Any:
    """Return loaded settings with texts as they are in the YAML, and without dotted keys."""
    from omegaconf import OmegaConf

    values = _keep_texts(OmegaConf.to_container(loaded, resolve=False), node, Config)
    return OmegaConf.create(_expand_dotted(Config, values, ""))


def _keep_texts(value: Any, node: Any, hint: Any) -> Any:
    """Return a value with the settings that are strings as written: `0123` is not 83, nor `on`.

    Args:
        node: its node in the YAML, which other values may share by an anchor; None: none.
    """
    import yaml

    hint = _without_none(hint)
    if node is None:
        kind = None
    else:
        kind = node.id
    if typing.get_origin(hint) is list:
        (item,) = typing.get_args(hint)
        if kind == "sequence" and isinstance(value, list):
            pairs = zip(value, node.value, strict=True)
            return [_keep_texts(one, its_node, item) for one, its_node in pairs]
        return _keep_texts(value, node, item)
    if dataclasses.is_dataclass(hint) and kind == "mapping" and isinstance(value, dict):
        yaml.constructor.SafeConstructor().flatten_mapping(node)  # `<<`
        nodes = {key.value: one for key, one in node.value if key.value in value}
        return value | {
            key: _keep_texts(value[key], one, _hint_at(hint, key.split(".")))
            for key, one in nodes.items()
        }
    if hint is str and kind == "scalar" and node.tag != _NULL:
        return node.value
    return value


def _expand_dotted(cls: Any, values: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Return the values with the keys of nested sections: what is written later overrides them.

    Keys of sections without fixed settings, such as `agent.upstreams`, may contain dots.
    """
    result = _by_section(values, prefix)
    for key, value in result.items():
        section = _without_none(_hint_at(cls, [key]))
        if dataclasses.is_dataclass(section) and isinstance(value, Mapping):
            result[key] = _expand_dotted(section, value, _join(prefix, key))
    return result


def _hint_at(hint: Any, keys: Sequence[str]) -> Any:
    """Return the type of a setting below one of this type; None: there is none."""
    for key in keys:
        section = _without_none(hint)
        if dataclasses.is_dataclass(section):
            hint = _hints_of(typing.cast(type, section)).get(key)
        else:
            hint = None
    return hint


@functools.cache  # text hints are compiled at each call otherwise: most of the time of a parse
def _hints_of(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def _without_none(hint: Any) -> Any:
    if typing.get_origin(hint) not in (types.UnionType, typing.Union):
        return hint
    (inner,) = [one for one in typing.get_args(hint) if one is not types.NoneType]
    return inner


def _uses_environment(written: Any) -> bool:
    if isinstance(written, dict):
        return any(map(_uses_environment, written.values()))
    if isinstance(written, list):
        return any(map(_uses_environment, written))
    return isinstance(written, str) and "oc.env" in written


def _mark_environment_values(value: Any, written: Any) -> Any:
    """Return the value with each string that an interpolation gave as an `EnvironmentValue`.

    All interpolations count: `${a.b}` may refer to one that reads an environment variable.

    Args:
        written: the same before it was resolved; a string where an interpolation gave a section.
    """
    inside = isinstance(written, str)
    if isinstance(value, dict):
        return {
            k: _mark_environment_values(item, written if inside else written[k])
            for k, item in value.items()
        }
    if isinstance(value, list):
        pairs = zip(value, [written] * len(value) if inside else written, strict=True)
        return [_mark_environment_values(item, one) for item, one in pairs]
    if isinstance(value, str) and inside and "${" in written:
        return EnvironmentValue(value, written)
    return value


def _build(cls: type, values: Any, prefix: str) -> Any:
    if dataclasses.is_dataclass(values) and not isinstance(values, type):
        values = to_dict(values, resolved=True)
    if not isinstance(values, Mapping):
        raise ConfigError(f"{prefix}: expected a section with keys, got {values!r}")
    values = _by_section(values, prefix)
    hints = _hints_of(cls)
    known = {item.name for item in dataclasses.fields(cls)}
    for key in values:
        if key not in known:
            raise ConfigError(_unknown_key(_join(prefix, str(key)), known))
    converted = {}
    for key, value in values.items():
        converted[key] = _convert(hints[key], value, _join(prefix, key))
    return cls(**converted)


def _by_section(values: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Return the values keyed by the first part of their keys; `a.b` is merged into `a`."""
    result: dict[str, Any] = {}
    for key, value in values.items():
        name, dot, rest = str(key).partition(".")
        new = {rest: value} if dot else value
        if name in result:
            old, new = (
                to_dict(one, resolved=True) if dataclasses.is_dataclass(one) else one
                for one in (result[name], new)
            )
            are_sections = isinstance(old, Mapping) and isinstance(new, Mapping)
            if not are_sections or old.keys() & new:
                raise ConfigError(f"{_join(prefix, str(key))}: given twice")
            new = {**old, **new}
        result[name] = new
    return result


def _convert(hint: Any, value: Any, key: str) -> Any:
    """Return the value as the hinted type; lossless conversions: int to float, item to list."""
    origin = typing.get_origin(hint)
    arguments = typing.get_args(hint)
    if hint is Any:
        return value
    if origin in (types.UnionType, typing.Union):
        if value is None:
            return None
        return _convert(_without_none(hint), value, key)
    if dataclasses.is_dataclass(hint):
        return _build(typing.cast(type, hint), value, key)
    if origin is list:
        if isinstance(value, (list, tuple)):
            items = value
        else:
            items = [value]
        if value is None or isinstance(value, Mapping):
            raise ConfigError(f"{key}: expected a list, got {value!r}")
        converted = []
        for number, item in enumerate(items):
            converted.append(_convert(arguments[0], item, f"{key}[{number}]"))
        return converted
    if origin is dict:
        if not isinstance(value, Mapping):
            raise ConfigError(f"{key}: expected a section with keys, got {value!r}")
        return dict(value)
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if hint is float and is_number and not isinstance(value, float):
        try:
            return float(value)
        except OverflowError:
            raise ConfigError(f"{key}: expected a number that a float can hold") from None
    if hint is str and is_number:
        return str(value)
    if hint is str and isinstance(value, os.PathLike):
        return os.fspath(value)
    is_text = hint is str and isinstance(value, EnvironmentValue)
    if type(value) is not hint and not is_text:
        raise ConfigError(f"{key}: expected {_article(hint)}, got {_describe(value)}")
    return value


def _describe(value: Any) -> str:
    """Return a value with its type; for an interpolation also how to get another type."""
    if not isinstance(value, EnvironmentValue):
        return f"{value!r} ({type(value).__name__})"
    written = value.written
    is_one = written.startswith("${") and written.find("}") == len(written) - 1
    if is_one:
        return f"{value!r} (str): write ${{oc.decode:{written}}}"
    return f"{value!r} (str)"


def _article(hint: type) -> str:
    return {int: "an integer", float: "a number", bool: "true or false", str: "a string"}[hint]


def _unknown_key(key: str, siblings: set[str]) -> str:
    advice = skyrl_advice(key)
    if advice is not None:
        return f"{key}: a SkyRL setting that does not exist here: {advice}"
    section, _, name = key.rpartition(".")
    places: dict[str, str] = {}  # the first place of each name
    sections: dict[str, str] = {}
    for path, _, _ in leaves(_with_optional_sections(), ""):
        places.setdefault(path.rpartition(".")[2], path)
        while path := path.rpartition(".")[0]:
            sections.setdefault(path.rpartition(".")[2], path)
    if name in _SYNONYMS:
        return f"{key}: unknown setting (did you mean {places[_SYNONYMS[name]]}?)"
    near = [_join(section, other) for other in _near(name, siblings)]
    if not near and name in sections:
        near = [sections[name]]
    advice = None if near else advice_by_name(name)
    if advice is not None:
        return f"{key}: unknown setting; SkyRL has one of this name: {advice}"
    candidates = near or [places[other] for other in _near(name, places)]
    if candidates:
        return f"{key}: unknown setting (did you mean {candidates[0]}?)"
    where = section or "the top level"
    return f"{key}: unknown setting; {where} has {', '.join(sorted(siblings))}"


def _near(name: str, known: Iterable[str]) -> list[str]:
    return difflib.get_close_matches(name, known, n=1, cutoff=_NEAR)


def _with_optional_sections() -> Config:
    config = Config()
    config.generator.eval_sampling_params = SamplingParams()
    return config


def _join(prefix: str, name: str) -> str:
    if prefix:
        return f"{prefix}.{name}"
    return name
