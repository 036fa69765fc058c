"""Agents with an OpenAI or Anthropic client as a generator of SkyRL.

    PYTHONPATH=examples/skyrl_agents python -m skyrl.train.entrypoints.main_base \\
        trainer.override_entrypoint=skyrl_agents \\
        agent.function=my_agent.py:solve generator.step_wise_trajectories=true ...

SkyRL's trainer, engines and configuration stay. `AgentGenerator` implements its
`GeneratorInterface`: an agent plays each trajectory through the gateway, in front of SkyRL's
inference engine client, and each of its calls is a row with the exact tokens.
"""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skyrl_fast.adapters.generator_output import generator_output_from_trajectories
from skyrl_fast.config import Config, GeneratorConfig, SamplingParams
from skyrl_fast.config.loading import as_config
from skyrl_fast.gateway.start import black_box, gateway_agent
from skyrl_fast.rollout.engine.protocol import EngineError, Generation
from skyrl_fast.rollout.engine.weights.gate import WeightGate
from skyrl_fast.rollout.failures import log_failures
from skyrl_fast.rollout.policy_calls import PolicyCalls
from skyrl_fast.rollout.stop_reason import STOP
from skyrl_fast.rollout.trajectory import Step, Trajectory
from skyrl_fast.rollout.trajectory_runner import TrajectoryRunner
from skyrl_fast.system.importing import absolute_name
from skyrl_fast.system.tasks import gather_or_cancel
from skyrl_fast.train.data.prompts import Prompt

# Settings of `generator` that SkyRL does not have.
OURS = ("tool_parser", "trajectory_timeout_seconds", "max_retries", "max_concurrent_trajectories")
# Keys of our generator output that SkyRL does not have, or that only some of its versions have.
EXTENSIONS = (
    "policy_versions",
    "env_classes",
    "data_sources",
    "rollout_kept_ids",
    "trajectory_time_splits",
)


class AgentGenerator:
    """A generator of SkyRL that runs agents.

    Args:
        generator_cfg: SkyRL's `generator`, with step_wise_trajectories.
        inference_engine_client: SkyRL's, or any with its `generate`.
        agent: settings of this package, with `agent.function` or `agent.command`: a `Config`, or a
            mapping with dotted keys. Of its `generator`, only the settings in `OURS` are used.

    Raises:
        ValueError: no agent, one that cannot be imported, or a setting of SkyRL that cannot work.

    Example:
        AgentGenerator(cfg.generator, client, tokenizer, agent={"agent.function": "my.py:solve"})
    """

    def __init__(
        self,
        generator_cfg: Any,
        inference_engine_client: Any,
        tokenizer: Any,
        *,
        agent: Config | Mapping[str, Any],
        policy_model_name: str | None = None,
    ) -> None:
        self._skyrl = generator_cfg
        self._client = inference_engine_client
        self._tokenizer = tokenizer
        self._settings = as_config(agent)
        self._policy_model_name = policy_model_name
        if not generator_cfg.step_wise_trajectories:
            raise ValueError("generator.step_wise_trajectories: expected true with an agent")
        if not self._settings.agent.is_set:
            raise ValueError("agent.function: expected a function or agent.command, got neither")
        # Its processes, if it has any, are kept from batch to batch, and end with this one.
        self._black_box = black_box(self._settings.agent)
        self._agent(_Client(self, {}, None), {})  # what is missing is found now

    async def generate(self, input_batch: Mapping[str, Any], **_: Any) -> dict[str, Any]:
        """Return the rows of a batch of prompts, in its order; see SkyRL's `GeneratorInterface`.

        Raises:
            RuntimeError: every trajectory failed.
        """
        ids = input_batch.get("trajectory_ids")
        if ids is None:
            raise ValueError(
                "AgentGenerator: trajectory_ids: expected one for each prompt, got none"
            )
        metadata = input_batch.get("batch_metadata")
        phase = "train" if metadata is None else str(metadata.training_phase)
        version = 0 if metadata is None else int(metadata.global_step or 0)
        sampling = dict(input_batch.get("sampling_params") or _sampling_of(self._skyrl, phase))
        client = _Client(self, sampling, f"policy-{version}" if self._uses_salt() else None)
        agent, config = self._agent(client, sampling)
        board = agent.policy.board
        runner = TrajectoryRunner(agent, config, board=board, faults=Counter())
        slots = asyncio.Semaphore(config.max_concurrent_trajectories)

        async def one(prompt: Prompt, repetition_id: int) -> Trajectory:
            async with slots:
                entry = board.enter(prompt.uid, repetition_id)
                return await runner.run(
                    prompt, repetition_id, phase=phase, policy_version=version, entry=entry
                )

        await agent.start()
        try:
            trajectories = await gather_or_cancel(
                one(prompt, int(each.repetition_id))
                for prompt, each in zip(_prompts(input_batch), ids, strict=True)
            )
        finally:
            await agent.gateway.close()
        return self._output(trajectories, ids)

    def _uses_salt(self) -> bool:
        return bool(getattr(self._skyrl, "use_cache_salt", False))

    def _agent(self, client: _Client, sampling: Mapping[str, Any]) -> tuple[Any, GeneratorConfig]:
        """Return the agent at a gateway in front of the client, and the settings of its calls."""
        skyrl = self._skyrl
        ours = self._settings.generator
        longest = sampling.get("max_tokens") or skyrl.sampling_params.max_generate_length
        config = GeneratorConfig(
            max_turns=skyrl.max_turns,
            max_input_length=skyrl.max_input_length or ours.max_input_length,
            sampling_params=SamplingParams(
                max_generate_length=int(longest), stop=_strings(sampling.get("stop"))
            ),
            context="append",
            chat_template=_chat_template(skyrl),
            chat_template_kwargs=dict(getattr(skyrl, "chat_template_kwargs", None) or {}),
            append_eos_token_after_stop_str_in_multi_turn=bool(
                getattr(skyrl, "append_eos_token_after_stop_str_in_multi_turn", True)
            ),
            **{name: getattr(ours, name) for name in OURS},
        )
        calls = PolicyCalls(client, WeightGate(), self._tokenizer, self._settings.trainer.seed)
        agent = gateway_agent(self._settings.agent, calls, config, agent=self._black_box)
        return agent, config

    def _output(self, trajectories: Sequence[Trajectory], ids: Sequence[Any]) -> dict[str, Any]:
        log_failures(trajectories)
        failures = [t.failure for t in trajectories if t.failure is not None]
        if len(failures) == len(trajectories):
            raise RuntimeError(f"all {len(failures)} trajectories failed; the first: {failures[0]}")
        for trajectory in trajectories:
            self._finish(trajectory)
        output: dict[str, Any] = dict(generator_output_from_trajectories(trajectories))
        for name in EXTENSIONS:
            output.pop(name, None)
        output["trajectory_ids"] = [
            one for one, t in zip(ids, trajectories, strict=True) for _ in t.steps
        ]
        return output

    def _finish(self, trajectory: Trajectory) -> None:
        """Give a trajectory a row that SkyRL takes, and apply SkyRL's two rules of stop reasons."""
        if trajectory.failure is not None or not trajectory.steps:
            (step,) = trajectory.steps_or_placeholder()
            step.response_ids, step.loss_mask = [self._tokenizer.eos_token_id], [0]
            step.rollout_logprobs = [0.0]
            trajectory.steps, trajectory.failure = [step], None
        if trajectory.stop_reason != STOP:
            for step in trajectory.steps:
                self._cut_off(step)

    def _cut_off(self, step: Step) -> None:
        if self._skyrl.zero_reward_on_non_stop:
            step.reward = 0.0
        if self._skyrl.apply_overlong_filtering:
            step.loss_mask = [0] * len(step.loss_mask)


@dataclass(frozen=True, slots=True)
class _Client:
    """SkyRL's inference engine client as a `Sampler`."""

    parent: AgentGenerator
    sampling: Mapping[str, Any]
    cache_salt: str | None

    async def generate(
        self,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        session_id: str,
        **_: Any,
    ) -> Generation:
        stops = sampling.stop or []
        request: dict[str, Any] = {
            "prompt_token_ids": [list(prompt_token_ids)],
            "sampling_params": {
                **self.sampling,
                "max_tokens": sampling.max_generate_length,
                "stop": stops or None,
                "include_stop_str_in_output": True,
                "logprobs": self.sampling.get("logprobs") or 0,
            },
            "session_ids": [session_id],
        }
        if self.cache_salt is not None:
            request["cache_salt"] = self.cache_salt
        name = self.parent._policy_model_name
        model = {} if name is None else {"model": name}
        try:
            answer = await self.parent._client.generate(request, **model)
        except Exception as error:  # of SkyRL's client: whatever its HTTP library raises
            raise EngineError(f"SkyRL's engine: {type(error).__name__}: {error}") from error
        token_ids = list(answer["response_ids"][0])
        logprobs = answer.get("response_logprobs")
        if logprobs is None or len(logprobs[0]) != len(token_ids):
            raise EngineError("SkyRL's engine returned no log-probability for each token")
        reason = answer["stop_reasons"][0]
        text = self.parent._tokenizer.decode(token_ids)
        ended_by = next((stop for stop in stops if text.endswith(stop)), None)
        return Generation(
            token_ids,
            list(map(float, logprobs[0])),
            reason,
            ended_by if reason == STOP else None,
        )


def _prompts(batch: Mapping[str, Any]) -> list[Prompt]:
    extras = batch.get("env_extras") or [{} for _ in batch["prompts"]]
    return [
        Prompt(str(one.instance_id), [dict(m) for m in messages], env_class, dict(extra))
        for one, messages, env_class, extra in zip(
            batch["trajectory_ids"], batch["prompts"], batch["env_classes"], extras, strict=True
        )
    ]


def _sampling_of(generator_cfg: Any, phase: str) -> dict[str, Any]:
    chosen = generator_cfg.sampling_params
    if phase == "eval" and generator_cfg.eval_sampling_params is not None:
        chosen = generator_cfg.eval_sampling_params
    names = ("temperature", "top_p", "top_k", "min_p", "logprobs", "stop")
    values = {name: getattr(chosen, name) for name in names}
    return {**values, "max_tokens": chosen.max_generate_length}


def _strings(stop: Any) -> list[str] | None:
    return [stop] if isinstance(stop, str) else list(stop or []) or None


def _chat_template(generator_cfg: Any) -> str | None:
    chosen = getattr(generator_cfg, "chat_template", None)
    if chosen is None or not _value(chosen, "name_or_path"):
        return None
    from skyrl.train.generators.utils import get_custom_chat_template

    text: str | None = get_custom_chat_template(chosen)
    return text


def _value(section: Any, name: str) -> Any:
    return section.get(name) if isinstance(section, Mapping) else getattr(section, name, None)


def split_arguments(arguments: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Return the settings of the agent, with dotted keys, and SkyRL's arguments.

    Args:
        arguments: those of SkyRL's command, with `agent.NAME=value` and the settings in `OURS`.

    Example:
        >>> split_arguments(["agent.command=[ls, -l]", "trainer.epochs=2"])
        ({'agent.command': ['ls', '-l']}, ['trainer.epochs=2'])
    """
    from omegaconf import OmegaConf

    ours = ("agent.", *(f"generator.{name}=" for name in OURS))
    settings: dict[str, Any] = {}
    rest = []
    for argument in arguments:
        name, _, _ = argument.partition("=")
        if argument.startswith(ours):
            values: Any = OmegaConf.from_dotlist([argument])
            settings[name] = OmegaConf.to_container(values, resolve=True)
            for part in name.split("."):
                settings[name] = settings[name][part]
        elif not argument.startswith("trainer.override_entrypoint="):
            rest.append(argument)
    function = settings.get("agent.function")
    if function is not None:  # a worker of Ray may run in another folder
        settings["agent.function"] = absolute_name(function, Path.cwd())
    return settings, rest


def _train(cfg: Any, settings: Mapping[str, Any]) -> None:
    from skyrl.train.entrypoints.main_base import BasePPOExp, resolve_policy_model_name
    from skyrl.train.generators.base import GeneratorInterface

    GeneratorInterface.register(AgentGenerator)

    class Experiment(BasePPOExp):
        def get_generator(self, cfg: Any, tokenizer: Any, inference_engine_client: Any) -> Any:
            return AgentGenerator(
                cfg.generator,
                inference_engine_client,
                tokenizer,
                agent=settings,
                policy_model_name=resolve_policy_model_name(cfg),
            )

    Experiment(cfg).run()


def main() -> None:
    import ray
    from skyrl.train.config import SkyRLTrainConfig
    from skyrl.train.utils import validate_cfg
    from skyrl.train.utils.utils import initialize_ray

    settings, rest = split_arguments(sys.argv[1:])
    as_config(settings)  # a misspelled name is found before Ray starts
    cfg = SkyRLTrainConfig.from_cli_overrides(rest)
    validate_cfg(cfg)
    initialize_ray(cfg)
    ray.get(ray.remote(num_cpus=1)(_train).remote(cfg, settings))


if __name__ == "__main__":
    main()
