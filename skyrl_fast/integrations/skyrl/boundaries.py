"""SkyRL's boundaries of mini-batches and prompts. N rows."""

from __future__ import annotations

from skyrl_fast.batch.split import mini_batch_boundaries
from skyrl_fast.integrations.skyrl.replacement import replaces, require


@replaces("compute_prompt_mini_batch_boundaries")
def compute_prompt_mini_batch_boundaries(
    uids: list[str],
    mini_batch_size: int,
    train_batch_size: int,
    is_stepwise: bool,
    n_samples_per_prompt: int,
) -> list[tuple[int, int]]:
    """Return the (start, end) rows of each mini-batch, as SkyRL's function of that name.

    Args:
        uids: N, the prompt of each row, without padding rows.
        mini_batch_size, train_batch_size: prompts of a mini-batch, and of all.
        is_stepwise: without it, every prompt must have `n_samples_per_prompt` rows.

    Example:
        >>> compute_prompt_mini_batch_boundaries(["a", "a", "b", "b"], 1, 2, False, 2)
        [(0, 2), (2, 4)]
    """
    require(len(uids) > 0, "no rows")
    boundaries = mini_batch_boundaries(uids, mini_batch_size)
    require(len(boundaries) * mini_batch_size == train_batch_size, "wrong number of prompts")
    if not is_stepwise:
        size = n_samples_per_prompt * mini_batch_size
        even = []
        for i in range(len(boundaries)):
            even.append((i * size, (i + 1) * size))
        require(boundaries == even, "prompts with different numbers of rows")
    return boundaries


@replaces("compute_prompt_boundaries")
def compute_prompt_boundaries(uids: list[str]) -> list[tuple[int, int]]:
    """Return the (start, end) rows of each prompt, as SkyRL's function of that name.

    Example:
        >>> compute_prompt_boundaries(["a", "a", "b"])
        [(0, 2), (2, 3)]
    """
    if len(uids):
        return mini_batch_boundaries(uids, 1)
    return []
