"""What `state.json` of a checkpoint may contain."""

from __future__ import annotations

import sys
from typing import Any

from skyrl_fast.system.printable import shorten

_MT19937_WORDS = 624  # words of the generators of Python and NumPy
_MAX_SHOWN = 60  # characters of a wrong value: a line of a terminal
_LARGEST = 2**53  # above, JSON readers and float64 metrics round integers


def check_state(state: Any) -> None:
    _mapping(state, "content")
    _integer(state, "step")
    _integer(state, "epochs_used_up", optional=True)
    if "kl_coef" in state:
        value = state["kl_coef"]  # a number, or one for each policy by name
        for name, coef in (value if isinstance(value, dict) else {"": value}).items():
            _finite(coef, f"kl_coef.{name}".rstrip("."))
    if state.get("unreported") is not None:
        for name, value in _mapping(state["unreported"], "unreported").items():
            _number(value, f"unreported.{name}")
    trainer = _mapping(_mapping(state.get("config", {}), "config").get("trainer", {}), "trainer")
    _integer(trainer, "epochs", least=1, optional=True)
    if trainer.get("max_training_steps") is not None:
        _integer(trainer, "max_training_steps", least=1)
    _check_sampler(_mapping(state.get("sampler"), "sampler"))
    _check_random(_mapping(state.get("random"), "random"))


def _check_sampler(sampler: dict[str, Any]) -> None:
    num_prompts = _integer(sampler, "num_prompts", least=1)
    batch_size = _integer(sampler, "batch_size", least=1, most=num_prompts)
    used = num_prompts // batch_size * batch_size  # number and order of an epoch
    _integer(sampler, "position", most=used - 1)
    _integer(sampler, "epoch")
    _integer(sampler, "seed", least=-_LARGEST)


def _check_random(random: dict[str, Any]) -> None:
    # NumPy trusts what it gets: a wrong position makes it read beyond its array.
    version, words, gauss = _list(random.get("python"), "random.python", length=3)
    _require(version == 3, "random.python[0]", "3", version)  # version of random.getstate
    _words(words, "random.python[1]", length=_MT19937_WORDS + 1)
    _position(words[-1], "random.python[1][-1]")
    if gauss is not None:
        _finite(gauss, "random.python[2]")
    kind, words, position, has_gauss, cached = _list(random.get("numpy"), "random.numpy", length=5)
    _require(kind == "MT19937", "random.numpy[0]", "MT19937", kind)
    _words(words, "random.numpy[1]", length=_MT19937_WORDS)
    _position(position, "random.numpy[2]")
    _require(has_gauss in (0, 1), "random.numpy[3]", "0 or 1", has_gauss)
    _finite(cached, "random.numpy[4]")


def _integer(
    values: dict[str, Any],
    name: str,
    *,
    least: int = 0,
    most: int = _LARGEST,
    optional: bool = False,
) -> int:
    if optional and name not in values:
        return 0
    value = values.get(name)
    _require(
        isinstance(value, int) and not isinstance(value, bool) and least <= value <= most,
        name,
        f"an integer from {least} to {most}",
        value,
    )
    assert isinstance(value, int)
    return value


def _number(value: Any, name: str) -> None:
    valid = isinstance(value, float) or (isinstance(value, int) and abs(value) <= _LARGEST)
    _require(valid, name, "a number", value)  # NaN is a metric's value where there is no token


def _finite(value: Any, name: str) -> None:
    finite = isinstance(value, int | float) and abs(value) <= sys.float_info.max
    _require(finite, name, "a finite number", value)


def _position(value: Any, name: str) -> None:
    _require(
        isinstance(value, int) and 0 <= value <= _MT19937_WORDS,
        name,
        f"an integer from 0 to {_MT19937_WORDS}",
        value,
    )


def _words(value: Any, name: str, *, length: int) -> None:
    words = _list(value, name, length=length)
    valid = all(isinstance(word, int) and 0 <= word < 2**32 for word in words)
    _require(valid, name, "integers of 32 bits", value)


def _mapping(value: Any, name: str) -> dict[str, Any]:
    _require(isinstance(value, dict), name, "an object", value)
    assert isinstance(value, dict)
    return value


def _list(value: Any, name: str, *, length: int) -> list[Any]:
    _require(
        isinstance(value, list) and len(value) == length, name, f"a list of {length} values", value
    )
    assert isinstance(value, list)
    return value


def _require(valid: bool, name: str, wanted: str, got: Any) -> None:
    if not valid:
        raise ValueError(f"{name}: expected {wanted}, got {shorten(repr(got), _MAX_SHOWN)}")
