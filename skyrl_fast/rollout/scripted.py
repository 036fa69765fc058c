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
    """A `Sampler` whose turn i is `answers[i]`; later turns repeat the last answer."""

    def __init__(self, answers: Sequence[str], tokenizer: Any) -> None:
        self._answers = list(answers)
        self._tokenizer = tokenizer
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
        turn = self._turns[session_id]
        self._turns[session_id] += 1
        text, stop_string = _cut_at_stop(
            self._answers[min(turn, len(self._answers) - 1)], sampling.stop or ()
        )
        token_ids = list(self._tokenizer.encode(text, add_special_tokens=False))
        if stop_string is None:
            token_ids.append(self._tokenizer.eos_token_id)
        cut = token_ids[: sampling.max_generate_length]
        truncated = len(cut) < len(token_ids)
        return Generation(
            cut,
            [0.0] * len(cut),
            "length" if truncated else "stop",
            None if truncated else stop_string,
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
            blocks = [_block("tools", json.dumps(tools, ensure_ascii=False))]
        for message in messages:
            calls = message.get("tool_calls")
            content = message.get("content") or ""
            if isinstance(content, str):
                text = content
            else:
                text = json.dumps(content, ensure_ascii=False)
            blocks.append(
                _block(
                    message["role"], text + (json.dumps(calls, ensure_ascii=False) if calls else "")
                )
            )
        return "".join(blocks) + ("[assistant] " if add_generation_prompt else "")

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
