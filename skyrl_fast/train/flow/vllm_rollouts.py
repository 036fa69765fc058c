"""Rollouts by vLLM, in this process or on servers: engines and agent loop from the settings."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from skyrl_fast.config import SamplingParams, estimator_spec, settings
from skyrl_fast.config.model_folder import model_folder
from skyrl_fast.gateway.start import black_box, gateway_agent
from skyrl_fast.rollout.chat_template import CHARACTERS_PER_TOKEN, message_text
from skyrl_fast.rollout.engine.api_key import DEFAULT_NAME, engine_key
from skyrl_fast.rollout.engine.pool import EnginePool, PooledEngine
from skyrl_fast.rollout.engine.protocol import Engine
from skyrl_fast.rollout.engine.ray_engine import EnginePlace, RayEngine
from skyrl_fast.rollout.engine.remote import RemoteEngine
from skyrl_fast.rollout.engine.vllm_engine import VllmEngine
from skyrl_fast.rollout.engine.vllm_start import VllmSetup
from skyrl_fast.rollout.engine.weights.gate import WeightGate
from skyrl_fast.rollout.engine.weights.group import BACKENDS
from skyrl_fast.rollout.engine.weights.probe_limits import ProbeLimits
from skyrl_fast.rollout.engine.weights.sync import (
    Logprobs,
    WeightSync,
    WeightSyncReport,
)
from skyrl_fast.rollout.engine.weights.transfer import (
    Weights,
    WeightTransfer,
    by_broadcast,
    by_file,
    by_ipc,
)
from skyrl_fast.rollout.env.factory import EnvFactory, check_env_classes
from skyrl_fast.rollout.env.host import MakeEnv
from skyrl_fast.rollout.env.reward_functions import GroupRewards, RewardFunctions
from skyrl_fast.rollout.group_runner import GroupRunner, OnGroup
from skyrl_fast.rollout.groups import environment_runner, run_groups
from skyrl_fast.rollout.loop_settings import loop_settings
from skyrl_fast.rollout.policy_calls import PolicyCalls
from skyrl_fast.rollout.reasoning import check_reasoning_parser
from skyrl_fast.rollout.tool_calls import check_tool_parser
from skyrl_fast.rollout.trajectory import Trajectory
from skyrl_fast.system.network_interface import LOOPBACK
from skyrl_fast.train.data.prompts import Prompt
from skyrl_fast.train.model.models import find_device
from skyrl_fast.train.model.policy import Policy

log = logging.getLogger(__name__)

PROBE_SEQUENCES = 2  # compared after each weight update; two prompts show any stale layer
PROBE_TOKENS = 48
WAIT_SECONDS = 1800.0  # for any engine of a cluster to come back if all are lost
# Faults that are reported even while their count is 0.
FAULTS = (
    "retried_trajectories",
    "environment_errors",
    "engine_errors",
    "slow_trajectories",
    "stuck_trajectories",
    "engine_deaths",
    "engine_restarts",
    "requests_sent_again",
)


async def start_rollouts(
    config: settings.Config,
    tokenizer: Any,
    model_path: str,
    *,
    prompts: Sequence[Prompt],
    make_env: MakeEnv | None = None,
    address: str = LOOPBACK,
    places: Sequence[EnginePlace] = (),
) -> VllmRollouts:
    """Start vLLM on a model folder, or connect to its servers, and start the environments' threads.

    Args:
        prompts: training prompts; the first ones are used to verify each weight update.
        make_env: creates environments from rows; None: by `env_class`.
        address: of this machine, which engines on a cluster reach.
        places: for engines on a cluster.

    Raises:
        EngineDeadError: vLLM is missing or did not start; the message says what to do.
        ValueError: an environment's module cannot be imported, or a setting is out of range.
    """
    longest_text = CHARACTERS_PER_TOKEN * (settings.max_input_length(config) + 1)
    environments = EnvFactory(config.environment, make_env=make_env, longest_text=longest_text)
    settings_of_engine = config.generator.inference_engine
    started = (
        cluster_engines(config, model_path, address, places)
        if config.engines_on_cluster
        else engines(config, model_path)
    )
    pool = EnginePool(
        started,
        max_restarts=settings_of_engine.max_restarts,
        transfer=_weight_transfer(config),
        wait_seconds=WAIT_SECONDS if config.engines_on_cluster else None,
    )
    on_group = None
    if isinstance(make_env, RewardFunctions):
        on_group = GroupRewards(environments, attempts=config.generator.max_retries + 1)
    rollouts = VllmRollouts(config, tokenizer, pool, environments, prompts, on_group=on_group)
    await rollouts.start()
    return rollouts


def check_rollouts(
    config: settings.Config,
    model_path: str,
    *,
    prompts: Sequence[Prompt],
    make_env: MakeEnv | None = None,
) -> None:
    """Check lengths and environments, before anything is loaded.

    Args: as for `start_rollouts`; all prompts, whose environments are looked up.

    Raises:
        ValueError: sequences can be too long for model or engine, an environment's module cannot be
            imported, or there is no environment of a row's name or no such tool parser.
    """
    vllm_setup(config, model_path)
    if config.generator.tool_parser is not None:
        check_tool_parser(config.generator.tool_parser)
    if config.generator.reasoning_parser is not None:
        check_reasoning_parser(config.generator.reasoning_parser)
    EnvFactory(config.environment, make_env=make_env)
    if config.agent.is_set:
        black_box(config.agent)
    elif make_env is None:
        check_env_classes(prompt.env_class for prompt in prompts)


def engines(config: settings.Config, model_path: str) -> list[PooledEngine]:
    """Return the engines that the settings ask for, not started."""
    engine = config.generator.inference_engine
    _say_limited_top_k(config.generator.sampling_params)
    if engine.run_engines_locally:
        return [VllmEngine(vllm_setup(config, model_path))]
    by = "reload" if engine.weight_sync_backend == "reload" else "file"
    return _servers(config, model_path, weight_sync=by)


def cluster_engines(
    config: settings.Config, model_path: str, address: str, places: Sequence[EnginePlace]
) -> list[PooledEngine]:
    """Return the engines of a cluster, not started.

    Args:
        address: of this machine, which the engines' nodes reach.
        places: one for each.
    """
    engine = config.generator.inference_engine
    _say_limited_top_k(config.generator.sampling_params)
    return [
        RayEngine(
            number,
            place,
            partial(_setup_on_node, config, model_path, number),
            weight_sync=_cluster_weight_sync(config),
            trainer=address,
            weights_folder=engine.weight_sync_path,
            records_routes=engine.enable_return_routed_experts,
            vocab_size=_vocab_size(_model_folder(model_path)),
        )
        for number, place in enumerate(places)
    ]


def _setup_on_node(config: settings.Config, model_path: str, number: int) -> VllmSetup:
    """Return an engine's settings on the node where it runs, where its model may be downloaded."""
    setup = vllm_setup(config, str(model_folder(model_path)))
    return replace(setup, log_file=str(Path(config.trainer.run_path) / f"engine_{number}.log"))


def _cluster_weight_sync(config: settings.Config) -> str:
    """Return how engines of a cluster get new weights; without a shared disk a file cannot."""
    chosen = config.generator.inference_engine.weight_sync_backend
    if chosen != "auto":
        return chosen
    return "nccl" if find_device(config.trainer.device).type == "cuda" else "gloo"


def untrained_engines(config: settings.Config, model_path: str) -> list[PooledEngine]:
    """Return the engines of a model whose weights are not updated, not started."""
    if config.generator.inference_engine.run_engines_locally:
        return [VllmEngine(vllm_setup(config, model_path))]
    return _servers(config, model_path, weight_sync=None)


def _servers(
    config: settings.Config, model_path: str, *, weight_sync: str | None
) -> list[PooledEngine]:
    engine, key = config.generator.inference_engine, engine_key(key_file(config))
    return [
        RemoteEngine(
            url,
            api_key=key,
            weight_sync=weight_sync,
            records_routes=engine.enable_return_routed_experts,
            vocab_size=_vocab_size(_model_folder(model_path)),
        )
        for url in engine.external_server_urls
    ]


def _weight_transfer(config: settings.Config) -> WeightTransfer:
    engine = config.generator.inference_engine
    backend = engine.weight_sync_backend
    if config.engines_on_cluster:
        backend = _cluster_weight_sync(config)
    if backend == "ipc":
        return by_ipc
    if backend in BACKENDS:
        return by_broadcast
    return by_file(engine.weight_sync_path, unnamed=config.engine_in_process)


def key_file(config: settings.Config) -> Path:
    """Return the file with the key of the run's external servers."""
    file = config.generator.inference_engine.api_key_file
    return Path(file).expanduser() if file else Path(config.trainer.run_path) / DEFAULT_NAME


class VllmRollouts:
    """The `Rollouts` of a real run: engines, agent loop, verified weight updates."""

    def __init__(
        self,
        config: settings.Config,
        tokenizer: Any,
        pool: EnginePool,
        environments: EnvFactory,
        prompts: Sequence[Prompt],
        *,
        on_group: OnGroup | None = None,
    ) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._pool = pool
        self._environments = environments
        self._probe_prompts = prompts[:PROBE_SEQUENCES]
        self._gate = WeightGate()
        calls = PolicyCalls(pool, self._gate, tokenizer, config.trainer.seed)
        loop = loop_settings(config)
        self._agent = None
        if config.agent.is_set:
            by_outcome = estimator_spec(config.trainer.algorithm).level == "outcome"
            self._agent = agent = gateway_agent(config.agent, calls, loop, one_line=not by_outcome)
            self._runner = GroupRunner(agent, loop, board=agent.policy.board)
        else:
            timeout = config.environment.timeout_seconds
            self._runner = environment_runner(
                calls, environments, loop, env_timeout_seconds=timeout, on_group=on_group
            )
        self.board = self._runner.board
        self._interrupted = 0
        self._updated = False
        self._sleeps = bool(config.generator.inference_engine.enable_sleep_mode)

    async def start(self) -> None:
        """Start the engines, and the gateway if there is an agent."""
        if self._agent is None:
            await self._pool.start()
            return
        try:
            await self._agent.start()
            await self._pool.start()
        except BaseException:
            await self._agent.close()
            raise

    async def generate(
        self, prompts: Sequence[Prompt], *, step: int, phase: str
    ) -> list[Trajectory]:
        """See `Rollouts.generate`."""
        version = step if phase == "train" else self._gate.version
        return await run_groups(self._runner, prompts, phase=phase, policy_version=version)

    async def sleep(self) -> None:
        """See `Rollouts.sleep`."""
        if not self._sleeps:
            return
        async with self._gate.closed(self._pool.release):
            await self._pool.sleep()

    async def update_weights(self, policy: Policy, *, version: int) -> dict[str, float]:
        """See `Rollouts.update_weights`.

        The first time, an engine of this process already has the weights of the model folder and
        is only verified.
        """

        def make_sync(engine: Engine) -> WeightSync:
            return self._weight_sync(engine, policy)

        in_flight = self._config.trainer.fully_async.weight_update == "in_flight"
        interrupt = self._pool.interrupt if in_flight else self._pool.release
        async with self._gate.closed(interrupt) as inside:
            if self._updated or not self._pool.start_with_model:
                report = await self._pool.update(self._weights(policy), make_sync)
            else:
                report = await self._pool.verify(make_sync)
            self._updated = True
            self._gate.version = version
        if in_flight:
            self._interrupted += inside
        return _sync_metrics(report, self._pool.reports)

    async def wait_for_fault(self) -> None:
        """See `Rollouts.wait_for_fault`."""
        await self._pool.wait_for_fault()

    async def repair(self, policy: Policy, *, version: int) -> None:
        """See `Rollouts.repair`."""
        assert version == self._gate.version
        await self._pool.repair(
            self._weights(policy), lambda engine: self._weight_sync(engine, policy)
        )

    def activity(self, uids: Sequence[str]) -> list[str]:
        """See `Rollouts.activity`."""
        now = self.board.clock()
        return [
            *self._pool.activity(),
            *(entry.describe(now) for entry in self.board.oldest(list(uids))),
        ]

    def faults(self) -> dict[str, float]:
        """See `Rollouts.faults`."""
        counts = {
            **dict.fromkeys(FAULTS, 0),
            **self._runner.faults,
            **self._pool.faults,
            **({} if self._agent is None else self._agent.gateway.faults),
            "environment_timeouts": self._environments.num_abandoned,
            "requests_interrupted": self._interrupted,
        }
        return {name: float(number) for name, number in counts.items()}

    async def close(self) -> None:
        """Stop the gateway, the agents, the engines and the environments' threads."""
        if self._agent is not None:
            await self._agent.close()
        await self._pool.close()
        await self._environments.close()

    def _weights(self, policy: Policy) -> Weights:
        """Return the policy's weights, which can be read several times.

        Where an engine sleeps they are an iterator, which makes room for it at its end: the engine
        wakes up on a GPU of the policy when all have been read.
        """
        weights = policy.named_weights(self._pool.weights_dtype)
        return self._then_make_room(weights, policy) if self._sleeps else weights

    def _then_make_room(
        self, weights: Iterable[tuple[str, torch.Tensor]], policy: Policy
    ) -> Iterator[tuple[str, torch.Tensor]]:
        yield from weights
        policy.free_cached_memory()

    def _weight_sync(self, engine: Engine, policy: Policy) -> WeightSync:
        chosen = self._config.generator.inference_engine.model_dtype
        dtype = policy.dtype if chosen == "auto" else getattr(torch, chosen)

        tolerance = self._config.trainer.sync_tolerance

        def replayed(probe: list[list[int]], routes: list[np.ndarray]) -> Logprobs:
            return [policy.sequence_logprobs(*one) for one in zip(probe, routes, strict=True)]

        return WeightSync(
            engine,
            probe=self._probe,
            trainer_logprobs=lambda probe: [policy.sequence_logprobs(ids) for ids in probe],
            replayed_logprobs=replayed if policy.router_replay else None,
            dtype=dtype,
            limits=ProbeLimits(maximum=tolerance) if tolerance else None,
        )

    @cached_property
    def _probe(self) -> list[list[int]]:
        """Token ids of the first prompts, truncated; the engine samples one token after them."""
        sampling = self._config.generator.sampling_params
        longest = settings.max_input_length(self._config) + sampling.max_generate_length - 1
        probe = []
        for prompt in self._probe_prompts:
            text = "\n".join(map(message_text, prompt.messages))
            ids = self._tokenizer.encode(text, add_special_tokens=False)
            ids = ids[: min(PROBE_TOKENS, longest)]
            probe.append(ids if len(ids) > 1 else [0, 1])
        return probe


def vllm_setup(config: settings.Config, model_path: str) -> VllmSetup:
    """Return the start-up settings of the engine, from generator.inference_engine.

    Args:
        model_path: a folder, or the hub name of a downloaded model.

    Raises:
        ValueError: prompt and response can exceed the model's `max_position_embeddings` or a
            `max_model_len` in engine_init_kwargs, or its config.json is invalid.
    """
    model_path = _model_folder(model_path)
    return VllmSetup(
        model=model_path,
        engine=config.generator.inference_engine,
        max_model_len=_longest_sequence(config, model_path),
        seed=config.trainer.seed,
        log_file=str(Path(config.trainer.run_path) / "engine.log"),
        reasoning_parser=config.generator.reasoning_parser,
    )


def _longest_sequence(config: settings.Config, model_path: str) -> int:
    """Return the tokens of the longest prompt and response."""
    generator = config.generator
    samplings = [generator.sampling_params, generator.eval_sampling_params]
    prompt = settings.max_input_length(config)
    response = max(s.max_generate_length for s in samplings if s is not None)
    lengths = (
        f"generator.max_input_length ({prompt}) and sampling_params.max_generate_length "
        f"({response})"
    )
    others = generator.inference_engine.engine_init_kwargs
    longest = others.get("max_model_len")
    if isinstance(longest, int) and prompt + response > longest:
        raise ValueError(
            f"{lengths}: wanted at most {longest} tokens together, as "
            "generator.inference_engine.engine_init_kwargs.max_model_len says, got "
            f"{prompt + response}"
        )
    positions = positions_of(model_path)
    if positions is not None and prompt + response > positions and not others:
        raise ValueError(
            f"{lengths}: wanted at most the {positions} positions of {model_path} together, got "
            f"{prompt + response}"
        )
    return prompt + response


def _model_folder(path: str) -> str:
    """Return the folder of a model's files, as the trainer finds it; else `path` itself."""
    from huggingface_hub import try_to_load_from_cache

    folder = Path(path).expanduser()
    if folder.is_dir():
        return str(folder)
    try:
        config = try_to_load_from_cache(path, "config.json")
    except ValueError:  # not a hub name either
        return path
    return str(Path(config).parent) if isinstance(config, str) else path


def positions_of(model_path: str) -> int | None:
    """Return the model's `max_position_embeddings`; None: unknown, or with scaled RoPE."""
    model = _model_config(model_path)
    rope = model.get("rope_parameters") or model.get("rope_scaling") or {}
    is_scaled = rope.get("rope_type", rope.get("type", "default")) != "default"
    return None if is_scaled else model.get("max_position_embeddings")


def _vocab_size(model_path: str) -> int | None:
    """Return the number of the model's token ids; None: unknown."""
    model = _model_config(model_path)
    text = model.get("text_config") or {}
    return model.get("vocab_size", text.get("vocab_size"))


def _model_config(model_path: str) -> dict[str, Any]:
    """Return the model's config.json; empty if there is none."""
    path = Path(model_path) / "config.json"
    if not path.is_file():
        return {}
    try:
        model = json.loads(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path}: invalid JSON: {error}") from error
    if not isinstance(model, dict):
        raise ValueError(f"{path}: wanted a JSON object, got {type(model).__name__}")
    return model


def _say_limited_top_k(sampling: SamplingParams) -> None:
    limit = sampling.num_kept_tokens
    if limit is not None and sampling.top_k < 1:
        log.info(
            "training samples from the %d most likely tokens at most "
            "(generator.sampling_params.max_kept_tokens), and records which remained",
            limit,
        )


def _sync_metrics(
    report: WeightSyncReport, of_engines: Mapping[int, WeightSyncReport]
) -> dict[str, float]:
    each = {
        f"sync/{name}_of_engine_{engine}": float(value)
        for engine, one in of_engines.items()
        for name, value in (("update_seconds", one.update_seconds), ("num_bytes", one.num_bytes))
    }
    return {
        **(each if len(each) > 2 else {}),  # with one engine they are those of the report
        "sync/update_seconds": report.update_seconds,
        "sync/num_bytes": float(report.num_bytes),
        "sync/verify_seconds": report.verify_seconds,
        "sync/logprob_abs_diff_max": report.difference.maximum,
        "sync/logprob_abs_diff_mean": report.difference.mean,
        "sync/logprob_abs_diff_q90": report.difference.quantile,
        "sync/logit_std": report.difference.logit_std,
        "sync/logprob_change_max": report.max_change,
    }
