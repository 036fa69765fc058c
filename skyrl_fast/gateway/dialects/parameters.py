"""Parameters of requests: which ones are honoured, refused, or ignored and named in the log.

What changes the answer or the prompt in a way that the gateway does not have is refused: an error
is better than another answer. docs/guide/gateway.md has the tables.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from skyrl_fast.gateway.messages import ApiError
from skyrl_fast.gateway.request_body import Fields

HONOURED = "honoured"
REFUSED = "refused"
IGNORED = "ignored"


@dataclass(frozen=True, slots=True)
class Parameter:
    """What becomes of a parameter.

    Args:
        note: why it is refused or ignored.
        plain: values without effect, besides null and an empty list.
    """

    kind: str
    note: str = ""
    plain: tuple[Any, ...] = ()


def _all(kind: str, note: str, *names: str, **plain: Any) -> dict[str, Parameter]:
    """Return parameters of one kind: some by name, others with a value that has no effect."""
    return {
        **{name: Parameter(kind, note) for name in names},
        **{name: Parameter(kind, note, (value,)) for name, value in plain.items()},
    }


UNKNOWN = Parameter(IGNORED, "the gateway does not know it")
RUNS = "the run's sampling parameters are used, so that the trainer can compute log-probabilities"
SAMPLING = _all(
    IGNORED,
    RUNS,
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "logit_bias",
    "bad_words",
    "allowed_token_ids",
    "thinking_token_budget",
    "length_penalty",
    **{"frequency_penalty": 0, "presence_penalty": 0, "repetition_penalty": 1, "min_tokens": 0},
    **{"ignore_eos": False},
)
TEMPLATE = "the chat template decides; chat_template_kwargs can set what it reads"
ACCOUNTS = _all(
    IGNORED,
    "it does not change the answer",
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "priority",
    "request_id",
    "cache_salt",
    "client_metadata",
)
OUTPUT = _all(
    IGNORED,
    "the answer has what its dialect names",
    "return_token_ids",
    "return_tokens_as_token_ids",
    "prompt_logprobs",
    "kv_transfer_params",
    skip_special_tokens=True,
    spaces_between_special_tokens=True,
    include_reasoning=True,
)
PROMPTS = _all(
    REFUSED,
    "prompts are those of the run's chat template",
    "chat_template",
    "documents",
    "mm_processor_kwargs",
    "media_io_kwargs",
    "truncate_prompt_tokens",
    "logits_processors",
    continue_final_message=False,
    add_generation_prompt=True,
    add_special_tokens=False,
)
ALTERNATIVES = _all(
    REFUSED, "only the sampled tokens' log-probabilities are recorded", top_logprobs=0
)
SEARCH = _all(REFUSED, "an answer is one sample", echo=False, best_of=1, use_beam_search=False)
CHAT = {
    **{**SAMPLING, **ACCOUNTS, **OUTPUT, **PROMPTS, **ALTERNATIVES, **SEARCH},
    **_all(IGNORED, TEMPLATE, "reasoning_effort", "verbosity"),
    **_all(
        REFUSED,
        "the gateway does not have it",
        "functions",
        "function_call",
        "audio",
        "prediction",
        "web_search_options",
        modalities=["text"],
    ),
}
COMPLETIONS = {
    **{**SAMPLING, **ACCOUNTS, **OUTPUT, **SEARCH},
    **_all(
        REFUSED,
        "the gateway does not have it",
        "suffix",
        "prompt_embeds",
        "truncate_prompt_tokens",
        "logits_processors",
        add_special_tokens=False,
    ),
}
RESPONSES = {
    **{**SAMPLING, **ACCOUNTS, **ALTERNATIVES},
    **_all(IGNORED, TEMPLATE, "reasoning"),
    **_all(IGNORED, "a prompt that is too long is refused", truncation="disabled"),
    **_all(IGNORED, "the gateway does not have it", "max_tool_calls", "stream_options"),
    **_all(REFUSED, "the gateway does not have it", "conversation", "prompt", background=False),
}
MESSAGES = {
    **_all(IGNORED, RUNS, "temperature", "top_p", "top_k"),
    **_all(IGNORED, TEMPLATE, thinking={"type": "disabled"}),
    **_all(
        IGNORED,
        "it does not change the answer",
        "metadata",
        "service_tier",
        "inference_geo",
        "speed",
        "cache_control",
        "betas",
    ),
    **_all(IGNORED, "the context is what the agent sends", "context_management"),
    **_all(REFUSED, "the gateway does not have it", "mcp_servers", "container"),
}


def check_parameters(fields: Fields, table: Mapping[str, Parameter]) -> dict[str, str]:
    """Return the parameters that a request sets and that are ignored, each with the reason.

    Fields that its class names are honoured. ApiError if one is refused.
    """
    ignored = {}
    for name, value in (fields.model_extra or {}).items():
        parameter = table.get(name, UNKNOWN)
        if value in (None, []) or value in parameter.plain:
            continue
        if parameter.kind == REFUSED:
            raise ApiError(
                400, f"{name}: it is not supported: {parameter.note}", code="unsupported"
            )
        ignored[name] = parameter.note
    return ignored
