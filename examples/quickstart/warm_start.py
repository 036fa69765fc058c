"""Makes the quickstart's tokenizer and model, and warm-starts the model on the demonstrations.

Shapes: B chats of a batch, L their longest length in tokens.
"""

from __future__ import annotations

import argparse
import math
import random
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from make_data import read_jsonl
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

PAD, START, END, UNKNOWN = "<|pad|>", "<|im_start|>", "<|im_end|>", "<|unknown|>"
SYMBOL = r"</?\w+>|\w+|[^\w\s]"  # a tag, a word or number, or a sign
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# What the environment may say beyond what the demonstrations show.
ENVIRONMENT_TEXTS = (
    "Your previous action is invalid. Follow the format of outputting thinking process and sql "
    "tool, and try again.",
    "Error executing SQL: no such table: no such column: near syntax error, db file: sqlite",
    "Empty DataFrame Columns: [] Index: [] None NaN . _ / -",
    "system user assistant",
)
MAX_LENGTH = 512
IGNORED = -100  # label of a token without loss
VOCABULARY_MULTIPLE = 64
LOG_EVERY = 25


def make_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """A tokenizer with one token for each word, number, tag or sign; blanks are not kept.

    Copying a name is then copying one token, which a tiny model learns in a minute. Decoding puts
    one blank between symbols, so text written that way survives encoding and decoding unchanged.

    Args:
        texts: everything that shall have tokens of its own.
    """
    words = {str(number) for number in range(100)}
    for text in (*texts, *ENVIRONMENT_TEXTS):
        words.update(re.findall(SYMBOL, text))
    vocabulary = {word: i for i, word in enumerate([PAD, START, END, UNKNOWN, *sorted(words)])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(SYMBOL), behavior="removed", invert=True)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        unk_token=UNKNOWN,
        additional_special_tokens=[START],
        clean_up_tokenization_spaces=False,
        model_max_length=MAX_LENGTH,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def make_model(
    tokenizer: PreTrainedTokenizerFast,
    *,
    seed: int = 0,
    hidden_size: int = 128,
    num_layers: int = 2,
    num_heads: int = 4,
    intermediate_size: int = 256,
) -> Qwen3ForCausalLM:
    """A small random Qwen3 model.

    Not Qwen2: transformers 5 loads the tokenizer of every folder with a Qwen2 model as Qwen2's own
    byte-level one, whatever the folder says.
    """
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=math.ceil(len(tokenizer) / VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_heads,
        head_dim=hidden_size // num_heads,
        max_position_embeddings=MAX_LENGTH,
        initializer_range=0.05,  # the usual 0.02 is too small at this width: copying starts late
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return Qwen3ForCausalLM(config)


def encode_chats(
    tokenizer: PreTrainedTokenizerFast, chats: Sequence[list[dict[str, str]]]
) -> list[tuple[list[int], list[int]]]:
    """Token ids and labels of each chat; labels are IGNORED outside the assistant's turns.

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


def make_batches(
    rows: Sequence[tuple[list[int], list[int]]],
    *,
    batch_size: int,
    num_parts: int,
    pad_token_id: int,
    seed: int,
) -> Iterator[list[tuple[torch.Tensor, torch.Tensor]]]:
    """Endless random batches, each cut into parts of like lengths so that little is padding.

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


def _pad(
    rows: Sequence[tuple[list[int], list[int]]], pad_token_id: int
) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (len(rows), max(len(ids) for ids, _ in rows))
    ids = torch.full(shape, pad_token_id)
    labels = torch.full(shape, IGNORED)
    for i, (row_ids, row_labels) in enumerate(rows):
        ids[i, : len(row_ids)] = torch.tensor(row_ids)
        labels[i, : len(row_labels)] = torch.tensor(row_labels)
    return ids, labels


def chat_loss(model: Qwen3ForCausalLM, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Summed cross entropy of the labelled tokens; the head runs only where there is a label.

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
    model: Qwen3ForCausalLM,
    rows: Sequence[tuple[list[int], list[int]]],
    *,
    seed: int = 0,
    num_steps: int = 300,
    batch_size: int = 32,
    learning_rate: float = 3e-3,
    num_warmup_steps: int = 20,
    num_parts: int = 2,
) -> float:
    """Trains in place, AdamW with a cosine schedule; prints and returns the last mean loss."""
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


def warm_start(data: Path, output: Path, *, seed: int = 0, **settings: Any) -> float:
    """Makes, trains and saves tokenizer and model as a Hugging Face folder.

    Args:
        data: folder written by ``make_data.py``.
        output: folder to write.
        seed: of the initial weights and of the order of the demonstrations.
        settings: options of `train`.

    Returns:
        The last mean loss.
    """
    chats = read_jsonl(data / "demonstrations.jsonl")
    tokenizer = make_tokenizer(message["content"] for chat in chats for message in chat)
    model = make_model(tokenizer, seed=seed)
    print(f"{len(tokenizer)} tokens, {model.num_parameters():,} parameters, {len(chats)} chats")
    loss = train(model, encode_chats(tokenizer, chats), seed=seed, **settings)
    tokenizer.save_pretrained(output)
    model.save_pretrained(output)
    return loss


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=Path("quickstart_data"))
    parser.add_argument("--output", type=Path, default=Path("quickstart_model"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--num-steps", type=int, default=300)
    args = parser.parse_args()
    warm_start(args.data, args.output, seed=args.seed, num_steps=args.num_steps)
    print("saved", args.output)


if __name__ == "__main__":
    main()
