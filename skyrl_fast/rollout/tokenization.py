"""Texts to tokens and back by the package tokenizers, where transformers adds nothing but time."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import lru_cache
from typing import Any


def encode(tokenizer: Any, text: str) -> list[int]:
    """Return the tokens of a text, without the special tokens that a tokenizer adds."""
    # transformers asks for the place of each token in the text, and drops it.
    ids: list[int]
    if _is_plain(tokenizer) and not tokenizer.split_special_tokens:
        backend = tokenizer.backend_tokenizer
        if not (backend.truncation or backend.padding or backend.encode_special_tokens):
            ids = backend.encode_batch_fast([text], add_special_tokens=False)[0].ids
            return ids
    ids = tokenizer.encode(text, add_special_tokens=False)
    return ids


def decode(tokenizer: Any, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
    """Return the text of tokens; transformers looks at the type of each one."""
    text: str
    if _is_plain(tokenizer) and not tokenizer.clean_up_tokenization_spaces:
        backend = tokenizer.backend_tokenizer
        text = backend.decode(token_ids, skip_special_tokens=skip_special_tokens)
    else:
        text = tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)
    return text


@lru_cache(maxsize=8)
def _is_plain(tokenizer: Any) -> bool:
    if "transformers" not in sys.modules:  # then it made no tokenizer
        return False
    from transformers import PreTrainedTokenizerFast as Usual

    names = ("encode", "_encode_plus", "decode", "_decode")
    return isinstance(tokenizer, Usual) and all(
        getattr(type(tokenizer), name) is getattr(Usual, name) for name in names
    )
