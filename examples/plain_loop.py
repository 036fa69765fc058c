"""The ops in a plain torch loop, without the trainer: a small model learns to answer in order.

    python examples/plain_loop.py

A prompt is a number from 0 to 7, the right answer the next three numbers. Each step samples eight
answers to each prompt, rewards the share of right numbers, and trains with GRPO's advantages and a
clipped loss. P prompts, G samples of each, N = P * G rows, T = 3 tokens of an answer, V tokens.
"""

import torch

from skyrl_fast import group_advantage, policy_loss, selected_logprob

PROMPTS = 8  # P, and V: prompts and answers have the same tokens
SAMPLES = 8  # G
TOKENS = 3  # T
STEPS = 20
EPOCHS = 2  # passes over each batch


def make_model() -> torch.nn.Module:
    """Return a model of the next token: the last one (N, T) gives logits (N, T, V)."""
    return torch.nn.Sequential(torch.nn.Embedding(PROMPTS, 32), torch.nn.Linear(32, PROMPTS))


@torch.no_grad()
def sample(model: torch.nn.Module, prompts: torch.Tensor) -> torch.Tensor:
    """Return (N, 1 + T): the prompts (N, 1) with sampled answers."""
    tokens = prompts
    for _ in range(TOKENS):
        probabilities = model(tokens)[:, -1].softmax(-1)
        tokens = torch.cat([tokens, torch.multinomial(probabilities, 1)], dim=1)
    return tokens


def reward(tokens: torch.Tensor) -> torch.Tensor:
    """Return (N,) float32: the share of an answer's numbers that follow the one before."""
    right = tokens[:, 1:] == (tokens[:, :-1] + 1) % PROMPTS
    return right.float().mean(dim=1)


def train(*, seed: int = 0) -> list[float]:
    """Return the mean reward of each step."""
    torch.manual_seed(seed)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    prompts = torch.arange(PROMPTS).repeat_interleave(SAMPLES)
    mask = torch.ones(len(prompts), TOKENS)
    curve = []
    for _ in range(STEPS):
        tokens = sample(model, prompts[:, None])
        rewards = reward(tokens)
        curve.append(rewards.mean().item())
        advantages = group_advantage(rewards, prompts)[:, None].expand(-1, TOKENS).contiguous()
        old_logprobs = None  # the first pass is the policy that sampled
        for _ in range(EPOCHS):
            logprobs = selected_logprob(model(tokens[:, :-1]), tokens[:, 1:])
            result = policy_loss(logprobs, old_logprobs, advantages, mask, loss="regular")
            optimizer.zero_grad()
            result.loss.backward()
            optimizer.step()
            old_logprobs = logprobs.detach() if old_logprobs is None else old_logprobs
    return curve


if __name__ == "__main__":
    for step, value in enumerate(train()):
        print(f"step {step:2}: reward {value:.2f}")
