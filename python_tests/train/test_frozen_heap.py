"""The heap of a run: what existed before it is not visited by garbage collections."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from _training import Recorder, folder, settings, train  # noqa: F401

from skyrl_fast.train import run as run_module

# In a process of its own: a collection visits all objects of the tests.
HEAP = """
import gc, weakref
from skyrl_fast.train.flow.frozen_heap import freeze_heap

class Node:
    def __init__(self):
        self.me = self

old = Node()
dead = weakref.ref(old)
with freeze_heap():
    assert gc.get_freeze_count() > 0
    del old
    new = weakref.ref(Node())
    gc.collect()
    assert new() is None and dead() is not None
assert gc.get_freeze_count() == 0
gc.collect()
assert dead() is None
gc.freeze()  # by the program itself: it stays
before = gc.get_freeze_count()
with freeze_heap():
    assert gc.get_freeze_count() == before
assert gc.get_freeze_count() == before > 0
"""


def test_old_objects_are_exempt_and_new_ones_are_collected() -> None:
    subprocess.run([sys.executable, "-c", HEAP], check=True, cwd=Path(__file__).parents[2])


def test_training_begins_with_a_frozen_heap(
    folder: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    frozen: list[bool] = []
    trained_frozen: list[bool] = []

    @contextmanager
    def recorded() -> Iterator[None]:
        frozen.append(True)
        yield
        frozen.pop()

    async def during(step: int) -> None:
        trained_frozen.append(bool(frozen))

    monkeypatch.setattr(run_module, "freeze_heap", recorded)
    train(settings(folder, "run", "trainer.max_training_steps=1"), Recorder(during))
    assert trained_frozen == [True] and frozen == []
