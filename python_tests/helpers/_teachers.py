"""Teachers whose engine is a model of this process."""

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch

from skyrl_fast.rollout.engine.prompt_scores import PromptScores, read_prompt_scores
from skyrl_fast.rollout.teachers import Teacher, Teachers


class ModelEngine:
    """Scores sequences by a transformers model, and records them."""

    name = "the model of this process"

    def __init__(self, model: Any) -> None:
        self.model = model
        self.scored: list[list[int]] = []
        self.starts = 0
        self.is_running = False

    async def start(self) -> None:
        self.starts += 1
        self.is_running = True

    async def close(self) -> None:
        self.is_running = False

    async def restart(self) -> None:
        await self.close()
        await self.start()

    @torch.no_grad()
    async def score_prompt(self, token_ids: Sequence[int], *, top_k: int = 0) -> PromptScores:
        self.scored.append(list(token_ids))
        logits = self.model(input_ids=torch.tensor([token_ids]), use_cache=False).logits[0, :-1]
        entries = []
        for row in logits.double().log_softmax(-1).tolist():
            entries.append(dict(enumerate(row)))
        return read_prompt_scores(token_ids, entries, top_k)


@cache
def _model_of(folder: str) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder).double().eval()


def teachers_of(sources: Mapping[str, str], *, top_k: int = 0) -> Teachers:
    """Return the teachers of these settings, each by the model of its folder."""
    teachers = {}
    for folder in dict.fromkeys(sources.values()):
        engine: Any = ModelEngine(_model_of(folder))
        teachers[folder] = Teacher(folder, engine, top_k=top_k)
    return Teachers(sources, teachers)
