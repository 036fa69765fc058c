"""The ops in a plain torch loop: the example learns."""

import pytest
import torch

from examples import plain_loop


def test_reward_is_the_share_of_numbers_in_order() -> None:
    tokens = torch.tensor([[0, 1, 2, 3], [6, 7, 0, 2], [3, 3, 3, 3]])
    assert plain_loop.reward(tokens).tolist() == pytest.approx([1, 2 / 3, 0])


@pytest.mark.parametrize("seed", [0, 1])
def test_the_loop_learns(seed: int) -> None:
    curve = plain_loop.train(seed=seed)
    assert curve[0] < 0.3  # chance is 1 / 8
    assert curve[-1] > 0.9
