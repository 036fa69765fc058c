"""Tokenizers like those of public model families: their special tokens and chat templates.

Texts have one token per byte. The templates are imitations, complete in what they do to roles,
tools, thoughts and the ends of turns.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "chat_templates"
THINK = ["<think>", "</think>", "<tool_call>", "</tool_call>"]  # added, but not special
CHATML = {"eos": "<|im_end|>", "special": ["<|im_start|>", "<|endoftext|>"], "added": THINK}
DEEPSEEK_TOOLS = [
    f"<｜tool▁{name}｜>"
    for name in (
        *("calls▁begin", "calls▁end", "call▁begin", "call▁end", "sep"),
        *("outputs▁begin", "outputs▁end", "output▁begin", "output▁end"),
    )
]
# name: template, end of sequence, beginning of sequence, special and other added tokens
FAMILIES: dict[str, dict[str, Any]] = {
    "deepseek_r1": {
        "eos": "<｜end▁of▁sentence｜>",
        "bos": "<｜begin▁of▁sentence｜>",
        "special": ["<｜User｜>", "<｜Assistant｜>"],
        "added": ["<think>", "</think>", *DEEPSEEK_TOOLS],
    },
    "gemma3": {
        **{"eos": "<eos>", "bos": "<bos>"},
        "special": ["<start_of_turn>", "<end_of_turn>"],
    },
    "gemma4": {
        **{"eos": "<turn|>", "bos": "<bos>"},
        "special": ["<eos>", "<|turn>", "<|tool_response>"],
        "added": [
            *("<|channel>", "<channel|>", "<|tool>", "<tool|>", "<|tool_call>", "<tool_call|>"),
            *("<tool_response|>", '<|"|>'),
        ],
    },
    "glm45": {
        "eos": "<|endoftext|>",
        "special": ["[gMASK]", "<sop>"]
        + [f"<|{role}|>" for role in ("system", "user", "assistant", "observation")],
        "added": THINK,
    },
    "glm45v": {
        "eos": "<|endoftext|>",
        "special": ["[gMASK]", "<sop>"]
        + [f"<|{role}|>" for role in ("system", "user", "assistant", "observation")]
        + [
            f"<|{part}{kind}|>"
            for kind in ("image", "video")
            for part in ("begin_of_", "", "end_of_")
        ],
        "added": THINK,
    },
    "gpt_oss": {
        "eos": "<|return|>",
        "special": ["<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|call|>"],
    },
    "granite33": {
        "eos": "<|end_of_text|>",
        "special": ["<|start_of_role|>", "<|end_of_role|>", "<|tool_call|>"],
    },
    "kimi_k2": {
        "eos": "<|im_end|>",
        "special": [f"<|im_{name}|>" for name in ("system", "user", "assistant", "middle")],
        "added": [f"<|tool_calls_section_{side}|>" for side in ("begin", "end")]
        + ["<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"],
    },
    "llama31": {
        **{"eos": "<|eot_id|>", "bos": "<|begin_of_text|>"},
        "special": ["<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", "<|end_of_text|>"],
    },
    "llama31 base": {
        **{"eos": "<|end_of_text|>", "bos": "<|begin_of_text|>"},
        "special": ["<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", "<|eot_id|>"],
    },
    "llama4": {
        **{"eos": "<|eot|>", "bos": "<|begin_of_text|>"},
        "special": ["<|header_start|>", "<|header_end|>", "<|eom|>", "<|end_of_text|>"],
    },
    "mistral3": {
        **{"eos": "</s>", "bos": "<s>"},
        "special": [
            f"[{side}{name}]"
            for name in ("INST", "AVAILABLE_TOOLS", "TOOL_RESULTS", "SYSTEM_PROMPT", "THINK")
            for side in ("", "/")
        ],
        "added": ["[TOOL_CALLS]", "[ARGS]"],
    },
    "mistral_v3": {
        **{"eos": "</s>", "bos": "<s>"},
        "special": [
            f"[{side}{name}]"
            for name in ("INST", "AVAILABLE_TOOLS", "TOOL_RESULTS")
            for side in ("", "/")
        ],
        "added": ["[TOOL_CALLS]"],
    },
    "phi4": {"eos": "<|im_end|>", "special": ["<|im_start|>", "<|im_sep|>"]},
    "qwen25": CHATML,
    "qwen3": CHATML,
    "qwen35": CHATML,
    "smollm3": CHATML,
    "chatml": CHATML,
    "chatml base": {"eos": "<|endoftext|>", "special": ["<|im_start|>", "<|im_end|>"]},
}


def family(name: str) -> Any:
    """Return the tokenizer of a family in `FAMILIES`."""
    template = (FOLDER / f"{name.split()[0]}.jinja").read_text()
    return byte_tokenizer(template, **FAMILIES[name])


def byte_tokenizer(
    template: str,
    *,
    eos: str,
    bos: str | None = None,
    special: Sequence[str] = (),
    added: Sequence[str] = (),
) -> Any:
    """Return a tokenizer with one token per byte, these added tokens and this chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bpe = Tokenizer(models.BPE(vocab={piece: n for n, piece in enumerate(alphabet)}, merges=[]))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    return _tokenizer(bpe, template, eos=eos, bos=bos, special=special, added=added)


def sentencepiece_tokenizer(
    template: str, scheme: str, *, eos: str, special: Sequence[str] = (), bos: str | None = None
) -> Any:
    """Return a tokenizer with one token per character that writes spaces as SentencePiece does.

    Args:
        template: the chat template.
        scheme: where a space is added: "first" (before a text), "always" (also after special
            tokens) or "never".
        eos, bos, special: special tokens.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    pieces = ["<unk>", "▁", "\n", *map(chr, range(33, 127)), "é"]
    vocabulary = {piece: n for n, piece in enumerate(pieces)}
    bpe = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    bpe.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    bpe.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse()])
    return _tokenizer(bpe, template, eos=eos, bos=bos, special=special, added=(), unk="<unk>")


def _tokenizer(
    bpe: Any,
    template: str,
    *,
    eos: str,
    bos: str | None,
    special: Sequence[str],
    added: Sequence[str],
    unk: str | None = None,
) -> Any:
    from tokenizers import AddedToken
    from transformers import PreTrainedTokenizerFast

    names = {"bos_token": bos, "unk_token": unk}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token=eos,
        pad_token=eos,
        additional_special_tokens=list(special),
        clean_up_tokenization_spaces=False,
        **{key: value for key, value in names.items() if value is not None},
    )
    tokenizer.add_tokens([AddedToken(name, normalized=False, special=False) for name in added])
    tokenizer.chat_template = template
    return tokenizer
