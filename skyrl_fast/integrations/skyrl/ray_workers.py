"""Installation in Ray's worker processes, not only in the driver.

Ray runs the setup hook that the runtime environment of `ray.init` names at the start of each worker
process. While the replacements are installed, `ray.init` adds `autoinstall` and its setting to that
environment, so that SkyRL's own call of `ray.init` needs no change. If Ray is started in another
way, pass `runtime_env()` to it.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from typing import Any

from skyrl_fast.integrations.calls import Counts
from skyrl_fast.integrations.skyrl import worker_calls

logger = logging.getLogger(__name__)
VARIABLE = "SKYRL_FAST_AUTOINSTALL"
HOOK = "worker_process_setup_hook"
AUTOINSTALL = "skyrl_fast.integrations.skyrl.autoinstall"
NEXT_HOOK = "SKYRL_FAST_NEXT_SETUP_HOOK"  # the user's setup hook, run after ours

_ray_init: Callable[..., Any] | None = None
_ray_shutdown: Callable[..., Any] | None = None
_collected: list[tuple[int, dict[str, Counts]]] = []  # counts of workers whose Ray was shut down


def runtime_env(mode: str = "compat", base: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return a Ray runtime environment whose workers install by themselves.

    Args:
        mode: as for `install`.
        base: an environment to add to; None: an empty one. A setup hook that it names by its
            import path runs after ours.

    Raises:
        ValueError: `base` has a setup hook that is no import path.

    Example:
        >>> runtime_env()["env_vars"]
        {'SKYRL_FAST_AUTOINSTALL': 'compat'}
    """
    env = dict(base or {})
    variables = dict(env.get("env_vars") or {})
    hook = env.get(HOOK)
    if hook is not None and hook != AUTOINSTALL:
        if not isinstance(hook, str):
            raise ValueError(
                f"runtime_env: {HOOK}: expected an import path to run after ours, got {hook!r}; "
                "call "
                f"{AUTOINSTALL} in it and pass ray_workers=False to install"
            )
        variables[NEXT_HOOK] = hook
    variables.setdefault(VARIABLE, mode)
    return {**env, HOOK: AUTOINSTALL, "env_vars": variables}


def add_hook(mode: str) -> None:
    """Make `ray.init` start workers that install; without Ray do nothing.

    `ray.shutdown` reads the workers' counts of calls first.
    """
    global _ray_init, _ray_shutdown
    try:
        import ray
    except ImportError:
        return
    if _ray_init is not None:
        remove_hook()
    if ray.is_initialized():
        logger.warning(
            "Ray is already running: its workers keep SkyRL's own functions; install before "
            "ray.init"
        )
    original = _ray_init = ray.init

    @functools.wraps(original)
    def init(*args: Any, **kwargs: Any) -> Any:
        kwargs["runtime_env"] = runtime_env(mode, kwargs.get("runtime_env"))
        return original(*args, **kwargs)

    shutdown_original = _ray_shutdown = ray.shutdown

    @functools.wraps(shutdown_original)
    def shutdown(*args: Any, **kwargs: Any) -> Any:
        _collected.append(worker_calls.collect())
        return shutdown_original(*args, **kwargs)

    ray.init = init
    ray.shutdown = shutdown


def calls_of_workers() -> tuple[int, dict[str, Counts]]:
    """Return the number of Ray workers that called replaced functions, and the calls by name.

    Also of those that `ray.shutdown` has ended. Waits a second for the workers' last calls.
    """
    total: dict[str, Counts] = {}
    workers = 0
    for number, counts in (*_collected, worker_calls.collect()):
        workers += number
        for name, one in counts.items():
            worker_calls.add_calls(total, name, one)
    return workers, total


def has_hook() -> bool:
    return _ray_init is not None


def remove_hook() -> None:
    global _ray_init, _ray_shutdown
    if _ray_init is not None:
        import ray

        ray.init = _ray_init
        ray.shutdown = _ray_shutdown
        _ray_init = _ray_shutdown = None
        _collected.clear()
