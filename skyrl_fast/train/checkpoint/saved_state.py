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
        if isinstance(value, dict):
            for name, coef in value.items():
                _finite(coef, f"kl_coef.{name}")
        else:
            _finite(value, "kl_coef")
    if state.get("unreported") is not None:
        unreported = _mapping(state["unreported"], "unreported")
        for name, value in unreported.items():
            _number(value, f"unreported.{name}")
    config = _mapping(state.get("config", {}), "config")
    trainer = _mapping(config.get("trainer", {}), "trainer")
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
    of_numpy = _list(random.get("numpy"), "random.numpy", length=5)
    kind, words, position, has_gauss, cached = of_numpy
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
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    wanted = f"an integer from {least} to {most}"
    _require(is_integer, name, wanted, value)
    assert isinstance(value, int)
    _require(least <= value <= most, name, wanted, value)
    return value


def _number(value: Any, name: str) -> None:
    is_exact = isinstance(value, int) and abs(value) <= _LARGEST
    valid = isinstance(value, float) or is_exact
    _require(valid, name, "a number", value)  # NaN is a metric's value where there is no token


def _finite(value: Any, name: str) -> None:
    finite = isinstance(value, int | float) and abs(value) <= sys.float_info.max
    _require(finite, name, "a finite number", value)


def _position(value: Any, name: str) -> None:
    is_place = isinstance(value, int) and 0 <= value <= _MT19937_WORDS
    _require(is_place, name, f"an integer from 0 to {_MT19937_WORDS}", value)


def _words(value: Any, name: str, *, length: int) -> None:
    words = _list(value, name, length=length)
    for word in words:
        is_word = isinstance(word, int) and 0 <= word < 2**32
        _require(is_word, name, "integers of 32 bits", value)


def _mapping(value: Any, name: str) -> dict[str, Any]:
    _require(isinstance(value, dict), name, "an object", value)
    assert isinstance(value, dict)
    return value


def _list(value: Any, name: str, *, length: int) -> list[Any]:
    is_list = isinstance(value, list) and len(value) == length
    _require(is_list, name, f"a list of {length} values", value)
    assert isinstance(value, list)
    return value


def _require(valid: bool, name: str, wanted: str, got: Any) -> None:
    if not valid:
        shown = shorten(repr(got), _MAX_SHOWN)
        raise ValueError(f"{name}: expected {wanted}, got {shown}")
