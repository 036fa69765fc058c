"""Other models of a run: OpenAI-compatible servers to which calls are forwarded by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from skyrl_fast.setting import ConfigError

KEYS = ("base_url", "api_key", "model")


@dataclass(frozen=True, slots=True)
class Upstream:
    """A server and the name of a model there; `base_url` includes `/v1`, `api_key` may be None."""

    base_url: str
    model: str
    api_key: str | None = field(default=None, repr=False)

    def request(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Return url, headers and JSON of a call of a gateway's path, such as `/v1/messages`."""
        key = self.api_key
        if key is None:
            headers = {}
        else:
            headers = {"authorization": f"Bearer {key}", "x-api-key": key}
        if path.startswith("/v1/messages"):
            headers["anthropic-version"] = "2023-06-01"
        return {
            "url": self.base_url + path.removeprefix("/v1"),
            "headers": headers,
            "json": {**body, "model": self.model},
        }


def upstreams_of(settings: Mapping[str, Any]) -> dict[str, Upstream]:
    """Return the servers of `agent.upstreams`, by the name that agents call.

    Raises:
        ConfigError: an entry is no mapping with `base_url`, or has another key.
    """
    result: dict[str, Upstream] = {}
    for name, v in settings.items():
        result[name] = _upstream(f"agent.upstreams.{name}", name, v)
    return result


def _upstream(where: str, name: str, values: Any) -> Upstream:
    if not isinstance(values, Mapping) or not values.keys() <= set(KEYS):
        raise ConfigError(
            f"{where}: expected a mapping with {', '.join(KEYS)}, got {values!r:.200}"
        )
    for key in KEYS:
        if not isinstance(values.get(key, ""), str):
            raise ConfigError(f"{where}.{key}: expected a string, got {values[key]!r:.200}")
    url = values.get("base_url", "")
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"{where}.base_url: expected http://host/v1, got {url!r:.200}")
    return Upstream(url.rstrip("/"), values.get("model", name), values.get("api_key"))
