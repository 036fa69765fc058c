"""The whole training loop in one file: read it from top to bottom, then change it.

    python examples/own_loop.py

The quickstart's model learns text-to-SQL by asking a database, with the package's parts and without
its trainer: prompts, rollouts on a real engine, rows, advantages, passes, loss, optimizer step, new
weights. What `skyrl-fast train` adds: evaluation, metrics, checkpoints that resume, LoRA, several
ranks, engines that generate meanwhile, and what happens when something dies.

N rows, one for each turn; A response tokens of all rows; M of them trained in one forward pass.
"""

import asyncio
import random
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # examples/ beside the package

from examples.quickstart.run import prepare
from skyrl_fast import (
    Config,
    MicroBatch,
    Optimizer,
    Policy,
    Prompt,
    Rollouts,
    StepBatch,
    compute_advantages,
    load_config,
    load_policy,
    load_prompts,
    load_tokenizer,
    policy_loss,
    response_positions,
    start_rollouts,
)
from skyrl_fast.batch import batch_from_trajectories

SETTINGS = Path(__file__).parent / "quickstart" / "config.yaml"
PROMPTS = 16  # of a step; the settings say how many trajectories each has
STEPS = 30
EPOCHS = 1  # passes over each batch
MINI_BATCHES = 2  # optimizer steps of an epoch


async def train(config: Config, steps: int = STEPS) -> list[float]:
    """Return the mean reward of each step."""
    path = config.trainer.policy.model.path
    tokenizer = load_tokenizer(path)
    prompts = load_prompts(config.data.train_data, default_env_class="text2sql")
    policy = load_policy(config)
    optimizer = Optimizer(
        policy,
        config.trainer.policy.optimizer_config,
        total_steps=steps * EPOCHS * MINI_BATCHES,
    )
    choose = random.Random(config.trainer.seed)
    curve = []
    rollouts = await start_rollouts(config, tokenizer, path, prompts=prompts)
    try:
        for step in range(steps):
            # The engine loads the weights, and a probe verifies that it samples from them.
            await rollouts.update_weights(policy, version=step)
            sampled = choose.sample(prompts, PROMPTS)
            batch, reward = await collect(rollouts, sampled, step)
            # On a GPU that both share, the engine leaves its memory to the update.
            await rollouts.sleep(policy)
            update(policy, optimizer, batch)
            curve.append(reward)
            print(f"step {step + 1:2}: reward {reward:.2f}", flush=True)
    finally:
        await rollouts.close()
    return curve


async def collect(rollouts: Rollouts, prompts: list[Prompt], step: int) -> tuple[StepBatch, float]:
    """Return the rows of a step with their advantages, and the mean reward."""
    # Several trajectories of each prompt; every turn has the exact tokens that the engine sampled.
    trajectories = await rollouts.generate(prompts, step=step, phase="train")
    rewards = [trajectory.outcome() for trajectory in trajectories]
    # One row for each turn: its prompt and its response. What failed before it acted has none.
    batch = batch_from_trajectories([one for one in trajectories if one.has_acted])
    # GRPO compares the last rewards of a group; all turns of a trajectory get its advantage.
    batch = compute_advantages(batch, estimator="grpo")
    return batch, sum(rewards) / len(rewards)


def update(policy: Policy, optimizer: Optimizer, batch: StepBatch) -> None:
    """Train on the batch: `EPOCHS * MINI_BATCHES` optimizer steps."""
    # Log-probabilities (A,) before the update, which the ratio of the loss is to.
    batch = batch.with_(old_logprobs=policy.batch_logprobs(batch))
    for _ in range(EPOCHS):
        for mini in batch.mini_batches(PROMPTS // MINI_BATCHES):
            optimizer.zero_grad()
            # Rows are divided by tokens, so that each pass fits the memory. Turns of a trajectory
            # that share a context share its forward pass.
            for micro in policy.passes(mini):
                loss_of_pass(policy, mini, micro).backward()
            optimizer.step()


def loss_of_pass(policy: Policy, batch: StepBatch, micro: MicroBatch) -> torch.Tensor:
    """Return the pass's part of the mini-batch's loss: the clipped one, the mean of all tokens."""
    logprobs, _ = policy.logprobs(micro)
    tokens = response_positions(batch, micro)  # (M,): which of the batch's they are

    def of_pass(values: torch.Tensor) -> torch.Tensor:
        return values[tokens][None].to(logprobs.device)

    num_trained = int((batch.loss_mask != 0).sum())
    result = policy_loss(
        logprobs[None],
        of_pass(batch.old_logprobs),
        of_pass(batch.advantages),
        of_pass(batch.loss_mask),
        loss="regular",
        row_weights=logprobs.new_full((1,), 1 / num_trained),
    )
    return result.loss


if __name__ == "__main__":
    torch.set_num_threads(1)  # the engine needs the other core
    prepare(Path("quickstart"))
    asyncio.run(train(load_config(SETTINGS, sys.argv[1:])))
