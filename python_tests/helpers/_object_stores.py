"""An object store in memory whose requests fail, or whose client is killed, at chosen calls."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from skyrl_fast.train.checkpoint import remote

URL = "flaky://bucket/run"


class FlakyStore(MemoryFileSystem):
    """Memory; `around` is called with each request's name, its paths and what does it."""

    protocol = "flaky"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    around: ClassVar[Callable[[str, str, Callable[[], Any]], Any]]

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        if isinstance(path, str):
            path = path.replace("flaky://", "memory://")
        return super()._strip_protocol(path)

    def _request(self, name: str, *paths: Any, **options: Any) -> Any:
        request = getattr(super(), name)
        return type(self).around(name, str(paths[-1]), lambda: request(*paths, **options))

    def ls(self, path: str, **options: Any) -> Any:
        return self._request("ls", path, **options)

    def cat_file(self, path: str, **options: Any) -> Any:
        return self._request("cat_file", path, **options)

    def info(self, path: str, **options: Any) -> Any:
        return self._request("info", path, **options)

    def rm(self, path: str, **options: Any) -> Any:
        return self._request("rm", path, **options)

    def get_file(self, there: str, here: str, **options: Any) -> Any:
        request = super().get_file
        return type(self).around("get_file", there, lambda: request(there, here, **options))

    def put_file(self, here: str, there: str, **options: Any) -> Any:
        request = super().put_file
        return type(self).around("put_file", there, lambda: request(here, there, **options))

    def pipe_file(self, path: str, value: bytes, **options: Any) -> Any:
        request = super().pipe_file
        return type(self).around("pipe_file", path, lambda: request(path, value, **options))


def plain(name: str, path: str, request: Callable[[], Any]) -> Any:
    """Make the request."""
    return request()


@contextmanager
def flaky_store() -> Iterator[type[FlakyStore]]:
    """Yield an empty store of flaky:// URLs, whose requests succeed until `around` is set."""
    fsspec.register_implementation("flaky", FlakyStore, clobber=True)
    FlakyStore.store, FlakyStore.pseudo_dirs = {}, [""]
    FlakyStore.around = staticmethod(plain)
    yield FlakyStore
    FlakyStore.around = staticmethod(plain)
    FlakyStore.store.clear()


@contextmanager
def failing(name: str, error: Exception, *, ending: str = "") -> Iterator[None]:
    """Let requests of this name fail in the block, those for paths with this ending."""

    def fail(request_name: str, path: str, request: Callable[[], Any]) -> Any:
        if request_name == name and path.endswith(ending):
            raise error
        return request()

    FlakyStore.around = staticmethod(fail)
    try:
        yield
    finally:
        FlakyStore.around = staticmethod(plain)


class KilledError(BaseException):
    """The process is killed: no request is made any more."""


class KillAt:
    """Kills the process at a request: before it is done, after it, or with half of it done.

    Args:
        number: of the request, from 0.
        when: "before", "after" or "half"; half of a deletion is that of every other object.
    """

    def __init__(self, number: int, when: str) -> None:
        self.left = number
        self.when = when
        self.killed = False

    def __call__(self, name: str, path: str, request: Callable[[], Any]) -> Any:
        """Make the request unless it is too late."""
        if self.killed:
            raise KilledError
        if self.left:
            self.left -= 1
            return request()
        self.killed = True
        if self.when == "after":
            request()
        if self.when == "half" and name == "rm":
            for key in sorted(k for k in FlakyStore.store if k.startswith(f"{path}/"))[::2]:
                del FlakyStore.store[key]
        raise KilledError


@pytest.fixture(autouse=True)
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[FlakyStore]]:
    """An empty store, whose requests are repeated at once."""
    monkeypatch.setattr(remote, "WAITS", (0.0, 0.0))
    with flaky_store() as found:
        yield found
