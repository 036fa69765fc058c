"""Byte-level BPE tokenizers with a chat template, for tests and benches."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_level_tokenizer(
    merges: Sequence[tuple[str, str]] = (),
    *,
    texts: Iterable[str] = (),
    vocab_size: int = 0,
    use_regex: bool = True,
) -> Any:
    """Return a tokenizer with a token for each byte and for each merge, and three special ones.

    Args:
        merges: in order; without any, each byte is one token.
        texts: to train merges on, up to `vocab_size`, in place of given ones.
        use_regex: whether merges stay within words.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = [*alphabet, *(first + second for first, second in merges)]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    bpe = Tokenizer(models.BPE(vocab=vocabulary, merges=list(merges)))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)
    bpe.decoder = decoders.ByteLevel()
    if vocab_size:
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size, initial_alphabet=alphabet, show_progress=False
        )
        bpe.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer
