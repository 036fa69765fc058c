"""The heap of a run: what existed before it is not visited by garbage collections."""

from __future__ import annotations

import gc
import weakref

from skyrl_fast.train.flow.frozen_heap import frozen_heap


class Node:
    def __init__(self) -> None:
        self.me = self


def test_old_objects_are_exempt_and_new_ones_are_collected() -> None:
    old, before = Node(), gc.get_freeze_count()
    dead = weakref.ref(old)
    with frozen_heap():
        assert gc.get_freeze_count() > before
        del old
        new = weakref.ref(Node())
        gc.collect()
        assert new() is None and dead() is not None
    assert gc.get_freeze_count() == 0
    gc.collect()
    assert dead() is None
