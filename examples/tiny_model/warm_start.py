"""The supervised phase before reinforcement learning: chats in, a model folder out.

Shapes: B chats of a batch, L their maximum length in tokens.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast
from transformers.utils import logging as transformers_logging

from examples.tiny_model.model import END, START, make_model

IGNORED = -100  # label of a token without loss
LOG_EVERY = 25

Chat = list[dict[str, str]]
Row = tuple[list[int], list[int]]  # ids and labels


def encode_chats(tokenizer: PreTrainedTokenizerFast, chats: Sequence[Chat]) -> list[Row]:
    """Return token ids and labels of each chat; labels are IGNORED outside the assistant's turns.

    The assistant's turns end with the end-of-turn token, which is trained as well.
    """
    texts = tokenizer.apply_chat_template(list(chats), tokenize=False)
    start, end, assistant = tokenizer.convert_tokens_to_ids([START, END, "assistant"])
    rows = []
    for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]:
        labels = [IGNORED] * len(ids)
        trained = False
        for i, token in enumerate(ids):
            if trained:
                labels[i] = token
            if token == end:
                trained = False
            elif token == assistant and ids[i - 1] == start:
                trained = True
        rows.append((ids, labels))
    return rows


def encode_turns(tokenizer: PreTrainedTokenizerFast, chats: Sequence[Chat]) -> list[Row]:
    """Return token ids and labels of each assistant turn, its prompt rendered by the template.

    For templates that rewrite the history: a turn's prompt does not begin with the previous one.
    """
    end = tokenizer.convert_tokens_to_ids(END)
    rows = []
    for chat in chats:
        for i, message in enumerate(chat):
            if message["role"] != "assistant":
                continue
            prompt = tokenizer.apply_chat_template(
                chat[:i], add_generation_prompt=True, tokenize=False
            )
            prompt_ids, response_ids = tokenizer(
                [prompt, message["content"]], add_special_tokens=False
            )["input_ids"]
            response_ids = [*response_ids, end]
            rows.append((prompt_ids + response_ids, [IGNORED] * len(prompt_ids) + response_ids))
    return rows


def make_batches(
    rows: Sequence[Row],
    *,
    batch_size: int,
    num_parts: int,
    pad_token_id: int,
    seed: int,
) -> Iterator[list[tuple[torch.Tensor, torch.Tensor]]]:
    """Yield endless random batches, each split into parts of similar lengths to save padding.

    Args:
        rows: ids and labels of each chat.
        batch_size: chats in a batch.
        num_parts: parts of a batch; each is ids and labels, (B, L) int64, padded on the right.
        pad_token_id: fills the ids.
        seed: of the order.
    """
    rng = random.Random(seed)
    order = list(range(len(rows)))
    batch_size = min(batch_size, len(rows))
    part_size = math.ceil(batch_size / num_parts)
    while True:
        rng.shuffle(order)
        for begin in range(0, len(rows) - batch_size + 1, batch_size):
            batch = [rows[i] for i in order[begin : begin + batch_size]]
            batch.sort(key=lambda row: len(row[0]))
            yield [
                _pad(batch[i : i + part_size], pad_token_id)
                for i in range(0, batch_size, part_size)
            ]


def _pad(rows: Sequence[Row], pad_token_id: int) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (len(rows), max(len(ids) for ids, _ in rows))
    ids = torch.full(shape, pad_token_id)
    labels = torch.full(shape, IGNORED)
    for i, (row_ids, row_labels) in enumerate(rows):
        ids[i, : len(row_ids)] = torch.tensor(row_ids)
        labels[i, : len(row_labels)] = torch.tensor(row_labels)
    return ids, labels


def chat_loss(model: PreTrainedModel, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the summed cross entropy of labelled tokens; the head runs only on those.

    Args:
        model: the policy.
        ids: (B, L) int64, padded on the right, so that causal attention needs no mask.
        labels: (B, L) int64, IGNORED where there is no loss.
    """
    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
    targets = labels[:, 1:]
    trained = targets != IGNORED
    return torch.nn.functional.cross_entropy(
        model.lm_head(hidden[:, :-1][trained]), targets[trained], reduction="sum"
    )


def train(
    model: PreTrainedModel,
    rows: Sequence[Row],
    *,
    seed: int = 0,
    num_steps: int = 300,
    batch_size: int = 32,
    learning_rate: float = 3e-3,
    num_warmup_steps: int = 20,
    num_parts: int = 2,
) -> float:
    """Train in place, AdamW with a cosine schedule; print and return the last mean loss."""
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=learning_rate, betas=(0.9, 0.98), weight_decay=0.01
    )

    def scale(step: int) -> float:
        cosine = 0.5 * (1 + math.cos(math.pi * step / num_steps))
        return min((step + 1) / num_warmup_steps, cosine)

    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, scale)
    batches = make_batches(
        rows,
        batch_size=batch_size,
        num_parts=num_parts,
        pad_token_id=model.config.pad_token_id,
        seed=seed,
    )
    started = time.perf_counter()
    losses: list[float] = []
    model.train()
    for step, parts in zip(range(1, num_steps + 1), batches, strict=False):
        num_trained = sum(int((labels[:, 1:] != IGNORED).sum()) for _, labels in parts)
        total = 0.0
        for ids, labels in parts:
            loss = chat_loss(model, ids, labels) / num_trained
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(total)
        if step % LOG_EVERY == 0 or step == num_steps:
            recent = losses[-LOG_EVERY:]
            seconds = time.perf_counter() - started
            mean = sum(recent) / len(recent)
            print(f"step {step:4d}/{num_steps}  loss {mean:.3f}  {seconds:5.1f} s", flush=True)
    model.eval()
    return sum(losses[-LOG_EVERY:]) / len(losses[-LOG_EVERY:])


def warm_start(
    tokenizer: PreTrainedTokenizerFast,
    rows: Sequence[Row],
    output: Path,
    *,
    seed: int = 0,
    make: Callable[..., PreTrainedModel] = make_model,
    **settings: Any,
) -> float:
    """Create and train a model, and save it with its tokenizer as a Hugging Face folder.

    Args:
        tokenizer: of the model.
        rows: from `encode_chats` or `encode_turns`.
        output: folder to write.
        seed: of the initial weights and of the order of the rows.
        make: creates the model, from the tokenizer and `seed=`.
        settings: options of `train`.

    Returns:
        The last mean loss.
    """
    transformers_logging.disable_progress_bar()  # of saving
    policy = make(tokenizer, seed=seed)
    print(f"{len(tokenizer)} tokens, {policy.num_parameters():,} parameters, {len(rows)} rows")
    loss = train(policy, rows, seed=seed, **settings)
    tokenizer.save_pretrained(output)
    policy.save_pretrained(output)
    return loss
