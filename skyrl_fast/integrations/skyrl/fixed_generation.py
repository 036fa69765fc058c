"""Mode "fixed": the specification's rules for the agent loop, around SkyRL's own loop."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import Any

import numpy as np

from skyrl_fast.integrations.skyrl.outputs import NO_TOKEN, SUPPORT
from skyrl_fast.integrations.skyrl.replacement import ORIGINALS
from skyrl_fast.ops.pack.routed_experts import append_rollout_expert_indices

LOOP = "SkyRLGymGenerator.agent_loop"
UPDATE = "SkyRLGymGenerator._update_agent_loop_state_with_multiturn_chat_template"


class _LimitedEngine:
    """Wraps the inference engine; it gets only prompts within the limit."""

    def __init__(self, engine: Any, limit: int | None, eos: int, top_k: int | None) -> None:
        self._engine = engine
        self._limit = limit
        self._eos = eos
        self._top_k = top_k
        self._gave_logprobs = False
        self.over = False
        self.last_ids: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def generate(self, engine_input: Any, **kwargs: Any) -> Any:
        """Return the engine's answer; for a prompt over the limit, an answer to be dropped."""
        if self._limit is not None and len(engine_input["prompt_token_ids"][0]) > self._limit:
            self.over = True
            logprobs = [[0.0]] if self._gave_logprobs else None
            answer = {
                "responses": [""],
                "response_ids": [[self._eos]],
                "stop_reasons": ["length"],
                "response_logprobs": logprobs,
            }
            if self._top_k is not None:
                answer[SUPPORT] = [_no_support(self._top_k)]
            return answer
        output = await self._engine.generate(engine_input, **kwargs)
        self._gave_logprobs = output.get("response_logprobs") is not None
        self.last_ids = list(output["response_ids"][0])
        return output


def _no_support(top_k: int) -> np.ndarray:
    """Return (1, K): the support of one token that was not sampled."""
    return np.full((1, top_k), NO_TOKEN, np.int32)


async def agent_loop(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Run SkyRL's loop by the enabled rules: `length_check`, `gen_only_rows`, `appended_eos`.

    SkyRL checks the length of the previous turn. Here a prompt over the limit reaches neither the
    engine nor the environment; its turn adds no step, and the last step's stop reason is "length".
    """
    original = ORIGINALS.require(LOOP)
    rules, eos = ORIGINALS.rules, self.tokenizer.eos_token_id
    arguments = inspect.signature(original).bind(self, *args, **kwargs).arguments
    step_wise = self.generator_cfg.step_wise_trajectories
    limit = arguments["max_input_length"] if step_wise and "length_check" in rules else None
    top_k = _support_width(self, arguments, original)
    wrapped = copy.copy(self)
    engine = _LimitedEngine(self.inference_engine_client, limit, eos, top_k)
    wrapped.inference_engine_client = engine
    wrapped._run_in_executor_if_available = _watch(self._run_in_executor_if_available, engine)
    output = await original(wrapped, *args, **kwargs)
    if step_wise:
        if limit is not None:
            row = original.__globals__["TrajectoryOutput"]
            _end_by_length(output, engine.over, row, eos, top_k)
        if "gen_only_rows" in rules:
            for step in output.step_outputs:
                _without_observation(step, eos)
    elif "appended_eos" in rules and not self.use_conversation_multi_turn:
        sampled = engine.last_ids[-1:] == [eos]
        if output.response_ids[-1:] == [eos] and not sampled:
            output.loss_mask[-1] = 0
    return output


def _watch(
    run: Callable[..., Awaitable[Any]], engine: _LimitedEngine
) -> Callable[..., Awaitable[Any]]:
    async def run_watched(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if engine.over and getattr(function, "__name__", "") == "step":
            return {"observations": [], "reward": 0.0, "done": True, "metadata": {}}
        return await run(function, *args, **kwargs)

    return run_watched


def _support_width(self: Any, arguments: dict[str, Any], original: Any) -> int | None:
    """Return the top_k whose choices this loop records, as SkyRL can since 0.4.0; None: nothing."""
    settings = getattr(self.generator_cfg, "inference_engine", None)
    if not getattr(settings, "enable_return_sample_support_set", False):
        return None
    if arguments.get("training_phase") == original.__globals__["TRAINING_PHASE_EVAL"]:
        return None
    sampling = arguments.get("sampling_params") or asdict(self.generator_cfg.sampling_params)
    return int(sampling["top_k"])


def _end_by_length(output: Any, over: bool, row: Any, eos: int, top_k: int | None) -> None:
    """Drop the turn over the limit; without steps add a masked row, its support `top_k` wide."""
    steps = output.step_outputs
    if over:
        dropped = steps.pop()
        if steps:
            steps[-1].stop_reason = "length"
            steps[-1].env_metrics = dropped.env_metrics
    if not steps:
        steps.append(
            row(
                response_ids=[eos],
                reward=[0.0],
                stop_reason="length",
                loss_mask=[0],
                prompt_ids=[eos],
                rollout_logprobs=[0.0],
                env_metrics={},
                **({} if top_k is None else {SUPPORT: _no_support(top_k)}),
            )
        )


def _without_observation(step: Any, eos: int) -> None:
    """Cut a step's response after the sampled tokens and an appended end token."""
    end = max((i + 1 for i, trained in enumerate(step.loss_mask) if trained), default=0)
    if end == 0:
        return
    if step.response_ids[end : end + 1] == [eos]:
        end += 1
    for field in ("response_ids", "loss_mask", "rollout_logprobs", "reward"):
        value = getattr(step, field)
        if isinstance(value, list):
            setattr(step, field, value[:end])
    support = getattr(step, SUPPORT, None)
    if support is not None:
        setattr(step, SUPPORT, support[:end])


def update_state(self: Any, agent_loop_state: Any, turn_output: Any) -> Any:
    """Return SkyRL's next state, with the turn's expert routes appended to the recorded ones."""
    original = ORIGINALS.require(UPDATE)
    recorded, new = agent_loop_state.rollout_expert_indices, turn_output.rollout_expert_indices
    state = original(self, agent_loop_state, turn_output)
    if not self.generator_cfg.step_wise_trajectories:
        state.rollout_expert_indices = append_rollout_expert_indices(recorded, new)
    return state
