"""Length of a run, in batches and in optimizer steps."""

from __future__ import annotations

from skyrl_fast.config import Config
from skyrl_fast.train.update import optimizer_steps_per_batch


def total_steps(config: Config, num_prompts: int) -> int:
    """Return the batches of the run: all epochs, or fewer by max_training_steps."""
    steps = config.trainer.epochs * (num_prompts // config.trainer.train_batch_size)
    limit = config.trainer.max_training_steps
    if limit is None:
        return steps
    return min(steps, limit)


def total_optimizer_steps(
    config: Config, num_prompts: int, *, mini_batch_size: int | None = None
) -> int:
    """Return the optimizer steps of the run, for learning-rate schedules."""
    settings = config.trainer
    per_batch = optimizer_steps_per_batch(
        settings.train_batch_size,
        mini_batch_size or settings.policy_mini_batch_size,
        settings.update_epochs_per_batch,
    )
    return total_steps(config, num_prompts) * per_batch
