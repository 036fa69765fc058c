"""Memory of large outputs is cached for reuse, up to a limit."""

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from skyrl_fast import _C, set_page_pool_limit
from skyrl_fast.ops import _backend

MIB = 1 << 20


@pytest.fixture(autouse=True)
def limit() -> Iterator[None]:
    before = _C.page_pool_limit()
    set_page_pool_limit(0)  # releases idle memory
    set_page_pool_limit(64 * MIB)
    yield
    set_page_pool_limit(max(before, 0))


def block(mib: int) -> torch.Tensor:
    return _backend.empty((mib * MIB,), torch.uint8)


def test_freed_block_is_reused() -> None:
    first = block(8)
    place = first.data_ptr()
    del first
    assert block(8).data_ptr() == place


def test_block_in_use_is_not_reused() -> None:
    kept = block(8)
    kept.fill_(7)
    view = kept[4 * MIB :]
    del kept
    gc.collect()
    other = block(8)
    other.fill_(1)
    assert int(view.min()) == 7


def test_idle_memory_stays_under_the_limit() -> None:
    blocks = [block(16) for _ in range(8)]
    del blocks
    assert 0 < _C.page_pool_idle_bytes() <= 64 * MIB
    set_page_pool_limit(0)
    assert _C.page_pool_idle_bytes() == 0


def test_negative_limit_is_refused() -> None:
    with pytest.raises(ValueError, match="set_page_pool_limit: num_bytes: expected at least 0"):
        set_page_pool_limit(-1)


@pytest.mark.parametrize("num_bytes", [2**59 + 1, 2**61, 2**63, 2**70])
def test_more_than_an_address_space_is_a_memory_error(num_bytes: int) -> None:
    with pytest.raises(MemoryError):
        _backend.empty((num_bytes,), torch.uint8)


@pytest.mark.parametrize(
    ("file", "content", "wanted"),
    [
        ("memory.max", "1073741824\n", 1 << 30),
        ("memory.max", "max\n", None),
        ("memory/memory.limit_in_bytes", "2147483648\n", 1 << 31),
        ("memory/memory.limit_in_bytes", "9223372036854771712\n", None),  # v1: no limit
    ],
)
def test_main_memory_is_that_of_the_container(
    tmp_path: Path, file: str, content: str, wanted: int | None
) -> None:
    path = tmp_path / file
    path.parent.mkdir(exist_ok=True)
    path.write_text(content)
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert _backend.main_memory(tmp_path) == (wanted or machine)
