"""A word-level tokenizer and a Qwen3 model of a third of a million parameters."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable

import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

PAD, START, END, UNKNOWN = "<|pad|>", "<|im_start|>", "<|im_end|>", "<|unknown|>"
SYMBOL = r"</?\w+>|\w+|#+|[^\w\s]"  # a tag, a word or number, the mark before an answer, a sign
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# As in templates of thinking models, earlier answers lose their thoughts.
THINKING_CHAT_TEMPLATE = CHAT_TEMPLATE.replace(
    "message['content'] +",
    "(message['content'].split('</think>')[-1] "
    "if message['role'] == 'assistant' else message['content']) +",
)
ROLES = "system user assistant"
MAX_LENGTH = 512
VOCABULARY_MULTIPLE = 64


def make_tokenizer(
    texts: Iterable[str], *, chat_template: str = CHAT_TEMPLATE, max_length: int = MAX_LENGTH
) -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token for each word, number, tag or sign; spaces are dropped.

    Copying a name is then copying one token, which a tiny model learns in a minute. Decoding puts
    one space between symbols, so text written that way survives encoding and decoding unchanged.

    Args:
        texts: their words become the vocabulary.
        chat_template: Jinja text.
        max_length: longest sequence of the model.
    """
    words = {str(number) for number in range(100)}
    for text in (*texts, ROLES):
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
        model_max_length=max_length,
    )
    fast.chat_template = chat_template
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
    """Return a small random Qwen3 model.

    Not Qwen2: for every folder with a Qwen2 model, transformers 5 loads Qwen2's byte-level
    tokenizer, whatever tokenizer the folder has.
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
        max_position_embeddings=tokenizer.model_max_length,
        initializer_range=0.05,  # the usual 0.02 is too small at this width: copying starts late
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return Qwen3ForCausalLM(config)
