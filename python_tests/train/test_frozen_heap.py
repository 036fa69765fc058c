"""The heap of a run: what existed before it is not visited by garbage collections."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
from _training import Recorder, folder, settings, train  # noqa: F401

from skyrl_fast.train import run as run_module
from skyrl_fast.train.flow.frozen_heap import frozen_heap


class Node:
    def __init__(self) -> None:
        self.me = self


@pytest.fixture
def nothing_frozen() -> Iterator[None]:
    gc.unfreeze()
    yield
    gc.collect()
    gc.freeze()


@pytest.mark.usefixtures("nothing_frozen")
def test_old_objects_are_exempt_and_new_ones_are_collected() -> None:
    old = Node()
    dead = weakref.ref(old)
    with frozen_heap():
        assert gc.get_freeze_count() > 0
        del old
        new = weakref.ref(Node())
        gc.collect()
        assert new() is None and dead() is not None
    assert gc.get_freeze_count() == 0
    gc.collect()
    assert dead() is None


@pytest.mark.usefixtures("nothing_frozen")
def test_objects_that_the_program_froze_stay_frozen() -> None:
    gc.freeze()
    before = gc.get_freeze_count()
    with frozen_heap():
        assert gc.get_freeze_count() == before
    assert gc.get_freeze_count() == before


@pytest.mark.usefixtures("nothing_frozen")
def test_training_begins_with_a_frozen_heap(
    folder: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    frozen = []

    async def during(step: int) -> None:
        frozen.append(gc.get_freeze_count() > 0)

    monkeypatch.setattr(run_module, "frozen_heap", frozen_heap)
    config = settings(
        folder, "run", "trainer.max_training_steps=1", "trainer.eval_before_train=false"
    )
    train(config, Recorder(during))
    assert frozen == [True] and gc.get_freeze_count() == 0
