"""Whether user code can be called as it will be: asked before an engine starts."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from typing import Any


class SignatureError(ValueError):
    """User code cannot be called as it will be; the message has its signature and ours."""


def check_reward(reward: Callable[..., Any]) -> None:
    """Raise SignatureError if a reward function cannot be called as reward(answer, row)."""
    _check_call("reward", reward, ("answer", "row"))


def check_environment(name: str, make_env: Callable[..., Any]) -> None:
    """Raise SignatureError if an environment, or its `step`, cannot be called as it will be.

    Args:
        make_env: called with a row: a class, or a function that returns an environment.
    """
    _check_call(name, make_env, ("row",))
    if inspect.isclass(make_env):
        step = getattr(make_env, "step", None)
    else:
        step = None
    if inspect.isfunction(step):
        _check_call(f"{name}.step", step, ("self", "action"))


def check_reward_function(name: str, function: Callable[..., Any], known: Collection[str]) -> None:
    """Raise SignatureError if a function of a group requires an argument that it will not get.

    Args:
        known: names of the arguments that it can have.
    """
    signature = _signature(function)
    if signature is None:
        return
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    for parameter in signature.parameters.values():
        is_variable = parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
        if is_variable or parameter.default is not parameter.empty:
            continue
        if parameter.kind not in by_name or parameter.name not in known:
            raise SignatureError(
                f"reward_funcs: {name}: expected arguments named {', '.join(sorted(known))}, got "
                f"{name}{signature}"
            )


def _check_call(name: str, function: Callable[..., Any], arguments: tuple[str, ...]) -> None:
    signature = _signature(function)
    if signature is None:
        return
    try:
        signature.bind(*arguments)
    except TypeError as error:
        called = ", ".join(argument for argument in arguments if argument != "self")
        raise SignatureError(
            f"{name}: expected a function that can be called as {name}({called}), got "
            f"{name}{signature}: {error}"
        ) from None


def _signature(function: Callable[..., Any]) -> inspect.Signature | None:
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):  # some built-in types have no signature
        return None
