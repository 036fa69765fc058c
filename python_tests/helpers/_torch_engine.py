"""An engine that samples with transformers in this process: the agent loop without vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from skyrl_fast.config import SamplingParams
from skyrl_fast.rollout.engine.protocol import Generation
from skyrl_fast.rollout.engine.vllm_start import VllmSetup
from skyrl_fast.rollout.engine.weight_transfer import WorkerCall


class TorchEngine:
    """Samples with the model in a folder, one sequence at a time and without a cache."""

    name = "transformers"
    starts_with_model = True
    weights_dtype = torch.float32

    def __init__(self, setup: VllmSetup) -> None:
        self._setup = setup

    async def start(self) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self._model = AutoModelForCausalLM.from_pretrained(self._setup.model).float().eval()
        self._eos = AutoTokenizer.from_pretrained(self._setup.model).eos_token_id

    async def close(self) -> None:
        pass

    async def generate(
        self,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        session_id: str,
        policy_version: int,
        seed: int | None = None,
        expert_indices_start: int = 0,
    ) -> Generation:
        random = torch.Generator().manual_seed(seed or 0)
        ids: list[int] = []
        logprobs: list[float] = []
        while len(ids) < sampling.max_generate_length and self._eos not in ids:
            values = self._logprobs([*prompt_token_ids, *ids])[-1]
            ids.append(int(torch.multinomial(values.exp(), 1, generator=random)))
            logprobs.append(float(values[ids[-1]]))
        return Generation(ids, logprobs, "stop" if self._eos in ids else "length")

    async def prompt_logprobs(self, token_ids: Sequence[int]) -> list[float]:
        values = self._logprobs(list(token_ids))
        return [float(values[i, token]) for i, token in enumerate(token_ids[1:])]

    async def load_weights(self, call: WorkerCall) -> None:
        from safetensors.torch import load_file

        self._model.load_state_dict(load_file(call.argument), strict=False)  # tied weights once

    async def reset_prefix_cache(self) -> None:
        pass

    async def sleep(self) -> None:
        pass

    async def interrupt(self) -> None:
        pass

    async def resume(self) -> None:
        pass

    async def comes_back(self) -> bool:
        return True

    @torch.no_grad()
    def _logprobs(self, token_ids: list[int]) -> torch.Tensor:
        logits: Any = self._model(input_ids=torch.tensor([token_ids])).logits
        return logits[0].float().log_softmax(-1)


@pytest.fixture
def torch_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make runs use `TorchEngine` instead of vLLM."""
    monkeypatch.setattr("skyrl_fast.train.flow.vllm_rollouts.VllmEngine", TorchEngine)
