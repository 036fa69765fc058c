"""A scripted model: given answers in place of sampled ones, so that no engine is needed."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from skyrl_fast.config import SamplingParams
from skyrl_fast.rollout.engine.protocol import Generation


class ScriptedModel:
    """A `Sampler` whose turn i is `answers[i]`; later turns repeat the last answer.

    Args:
        one_each: the answers are those of sessions, of one turn each, not of turns.
    """

    def __init__(self, answers: Sequence[str], tokenizer: Any, *, one_each: bool = False) -> None:
        self._answers = list(answers)
        self._tokenizer = tokenizer
        self._one_each = one_each
        self._turns: Counter[str] = Counter()  # turns played in each session

    async def generate(
        self,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        session_id: str,
        **_: Any,
    ) -> Generation:
        """Return the turn's answer, ended as an engine would: by end token, stop string or length.

        Log-probabilities are 0.
        """
        if self._one_each:
            number = len(self._turns)
        else:
            number = self._turns[session_id]
        self._turns[session_id] += 1
        answer = self._answers[min(number, len(self._answers) - 1)]
        text, stop_string = _cut_at_stop(answer, sampling.stop or ())
        token_ids = list(self._tokenizer.encode(text, add_special_tokens=False))
        if stop_string is None:
            token_ids.append(self._tokenizer.eos_token_id)
        cut = token_ids[: sampling.max_generate_length]
        stop_reason = "stop"
        if len(cut) < len(token_ids):
            stop_reason = "length"
            stop_string = None
        return Generation(
            cut,
            [0.0] * len(cut),
            stop_reason,
            stop_string,
        )


def _cut_at_stop(text: str, stops: Sequence[str]) -> tuple[str, str | None]:
    found = [(text.index(stop) + len(stop), stop) for stop in stops if stop in text]
    if not found:
        return text, None
    end, stop = min(found)
    return text[:end], stop


class PlainTokenizer:
    """Words and punctuation as tokens, of at most four characters, with a plain chat template.

    It has what the agent loop needs of a tokenizer of transformers; lengths are approximate.
    """

    eos_token = "<|end|>"
    eos_token_id = 0
    all_special_tokens = (eos_token,)
    _TOOLS = "tools"  # role of their block, the first one
    _TOKENS = re.compile(r"<\|end\|>|\w{1,4}|\s+|.", re.DOTALL)

    def __init__(self) -> None:
        self._tokens = [self.eos_token]
        self._ids = {self.eos_token: self.eos_token_id}

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        tools: Sequence[Any] | None = None,
        **_: Any,
    ) -> str:
        if not tools:
            blocks = []
        else:
            blocks = [_block(self._TOOLS, json.dumps(tools, ensure_ascii=False))]
        for message in messages:
            calls = message.get("tool_calls")
            content = message.get("content") or ""
            if isinstance(content, str):
                text = content
            else:
                text = json.dumps(content, ensure_ascii=False)
            if calls:
                text += json.dumps(calls, ensure_ascii=False)
            blocks.append(_block(message["role"], text))
        if add_generation_prompt:
            blocks.append("[assistant] ")
        return "".join(blocks)

    def shows_tools(self, prompt_token_ids: Sequence[int]) -> bool:
        """Return whether a prompt begins with tools, which this chat template always writes."""
        return self.decode(prompt_token_ids).startswith(f"[{self._TOOLS}] ")

    def get_vocab(self) -> dict[str, int]:
        return dict(self._ids)

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        ids = []
        for token in self._TOKENS.findall(text):
            if token not in self._ids:
                self._ids[token] = len(self._tokens)
                self._tokens.append(token)
            ids.append(self._ids[token])
        return ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        kept = (i for i in token_ids if not (skip_special_tokens and i == self.eos_token_id))
        return "".join(self._tokens[i] for i in kept)


def _block(role: str, text: str) -> str:
    return f"[{role}] {text}{PlainTokenizer.eos_token}\n"
