"""Rollouts by vLLM: engines, agent loop and verified weight updates of a run.

Design: docs/design/018-asynchronous.md.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from itertools import cycle, islice
from typing import Any

import torch

from skyrl_fast.config import estimator_spec, settings
from skyrl_fast.config.modes import EnginePlace, EngineWeights
from skyrl_fast.gateway.start import black_box, gateway_agent
from skyrl_fast.rollout.chat_template import CHARACTERS_PER_TOKEN, message_text
from skyrl_fast.rollout.engine.from_settings import (
    choose_transport,
    describe_start,
    make_cluster_engines,
    make_engines,
    make_untrained_engines,
    make_vllm_setup,
)
from skyrl_fast.rollout.engine.pool import EnginePool, PoolSeconds
from skyrl_fast.rollout.engine.protocol import Engine
from skyrl_fast.rollout.engine.ray_engine import EngineBundle
from skyrl_fast.rollout.engine.remote import find_silent_servers
from skyrl_fast.rollout.engine.start_report import report_start
from skyrl_fast.rollout.engine.weights.gate import WeightGate
from skyrl_fast.rollout.engine.weights.probe import (
    Logprobs,
    PolicyProbes,
    Probe,
    ProbeLimits,
    WeightProbe,
    WeightSyncReport,
)
from skyrl_fast.rollout.engine.weights.transfer import Weights
from skyrl_fast.rollout.engine.weights.transports.memory import SharedMemory
from skyrl_fast.rollout.env.factory import EnvFactory, check_env_classes
from skyrl_fast.rollout.env.handler import MakeEnv
from skyrl_fast.rollout.env.reward_functions import GroupRewards, RewardFunctions
from skyrl_fast.rollout.group_runner import GroupRunner, OnGroup
from skyrl_fast.rollout.groups import environment_runner, run_groups
from skyrl_fast.rollout.loop_settings import loop_settings
from skyrl_fast.rollout.policy_calls import PolicyCalls
from skyrl_fast.rollout.reasoning import ReasoningParser
from skyrl_fast.rollout.tool_calls import ToolCallParser
from skyrl_fast.rollout.trajectory import Trajectory
from skyrl_fast.system.network_interface import LOOPBACK
from skyrl_fast.train.data.prompts import Prompt
from skyrl_fast.train.flow.gpu_sharing import make_gpu_sharing
from skyrl_fast.train.model.loading import load_tokenizer
from skyrl_fast.train.model.policy import Policy
from skyrl_fast.train.parallel.sharding import weights_of

log = logging.getLogger(__name__)

# Compared after each weight update. The engine may compute the first alone; the others share a
# step, in which no sequence may change another.
PROBE_SEQUENCES = 4
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
    bundles: Sequence[EngineBundle] = (),
    trained: bool = True,
    say: Callable[[str], None] | None = None,
    is_stopping: Callable[[], bool] = bool,
) -> VllmRollouts:
    """Start vLLM on a model folder, or connect to its servers, and start the environments' threads.

    Args:
        config: settings of the generator, the environment and the engine.
        tokenizer: the model's, with its chat template.
        model_path: folder of the model that the engine starts with.
        prompts: training prompts; the first ones are used to verify each weight update.
        make_env: creates environments from rows; None: by `env_class`.
        address: address of this machine, which engines on a cluster reach.
        bundles: places of the engines of a cluster; none: they are on this machine, or servers.
        trained: False: the engines' weights are never updated; servers need no road for them.
        say: called with a line when the engine begins to start, every 15 s until it has, and when
            it is ready; None: they are logged.
        is_stopping: whether the run is ending, so that no dead engine is started again.

    Raises:
        EngineDeadError: vLLM is missing or did not start; the message says what to do.
        ValueError: an environment's module cannot be imported, or a setting is out of range.
    """
    longest_text = CHARACTERS_PER_TOKEN * (config.generator.max_input_length + 1)
    environments = EnvFactory(config.environment, make_env=make_env, longest_text=longest_text)
    settings_of_engine = config.generator.inference_engine
    if not trained:
        started = make_untrained_engines(config, model_path)
    elif bundles:
        started = make_cluster_engines(config, model_path, address, bundles)
    else:
        started = make_engines(config, model_path)
    transport = choose_transport(config)
    if config.engine_place is EnginePlace.CLUSTER:
        seconds = PoolSeconds(back=WAIT_SECONDS)
    else:
        seconds = PoolSeconds()
    pool = EnginePool(
        started,
        max_restarts=settings_of_engine.max_restarts,
        transport=transport,
        seconds=seconds,
        is_stopping=is_stopping,
    )
    on_group = None
    if isinstance(make_env, RewardFunctions):
        on_group = GroupRewards(environments, attempts=config.generator.max_retries + 1)
    if isinstance(transport, SharedMemory):
        memory = transport
    else:
        memory = None
    rollouts = VllmRollouts(
        config,
        tokenizer,
        pool,
        environments,
        prompts,
        on_group=on_group,
        memory=memory,
    )
    begin, engine_log = describe_start(config, model_path, on_nodes=bool(bundles))
    with report_start(begin, engine_log, say or log.info):
        await rollouts.start()
    return rollouts


def check_parsers_and_servers(config: settings.Config) -> None:
    """Look up the parsers of vLLM, and warn of servers that cannot be reached.

    It comes first of a start's checks: data and models have nothing to do with these, and a server
    may be started while they are loaded.

    Raises:
        ValueError: vLLM is missing or has no such parser.
    """
    generator = config.generator
    if generator.tool_parser is not None:
        ToolCallParser.find_class(generator.tool_parser)
    if generator.reasoning_parser is not None:
        ReasoningParser.find_class(generator.reasoning_parser)
    urls = generator.inference_engine.external_server_urls
    for url, reason in find_silent_servers(urls).items():
        log.warning(
            "generator.inference_engine.external_server_urls: %s cannot be reached (%s); the run "
            "waits for it once its models are loaded",
            url,
            reason,
        )


def check_rollouts(
    config: settings.Config,
    model_path: str,
    *,
    prompts: Sequence[Prompt],
    make_env: MakeEnv | None = None,
) -> None:
    """Check lengths, and the environments of all prompts, before anything is loaded.

    Raises:
        ValueError: there is no tokenizer or chat template, sequences can be too long for model or
            engine, an environment cannot be imported or called, a reward function needs an argument
            that it will not get, or there is no environment of a row's name.
    """
    make_vllm_setup(config, model_path)
    EnvFactory(config.environment, make_env=make_env)
    if config.agent.is_set:
        black_box(config.agent)
    elif isinstance(make_env, RewardFunctions):
        make_env.check_arguments([prompt.env_extras for prompt in prompts])
    elif make_env is None:
        check_env_classes((prompt.env_class for prompt in prompts), config.environment)
    if config.generator.chat_template is None:
        _check_chat_template(model_path)


def _check_chat_template(model_path: str) -> None:
    if load_tokenizer(model_path).chat_template is None:
        raise ValueError(
            "generator.chat_template: expected Jinja source, a file, or plain, as the tokenizer of "
            f"{model_path} has no chat template (it is that of a base model), got null"
        )


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
        memory: SharedMemory | None = None,
    ) -> None:
        self._config = config
        self._memory = memory
        self._tokenizer = tokenizer
        self._pool = pool
        self._environments = environments
        self._probe_prompts = list(islice(cycle(prompts), PROBE_SEQUENCES))
        self._gate = WeightGate()
        calls = PolicyCalls(
            pool,
            self._gate,
            tokenizer,
            config.trainer.seed,
            config.call_names,
            are_roles=bool(config.roles),
        )
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
        self._sharing = make_gpu_sharing(config, pool)
        # By policy, of the probe with the weights of the last update: once for all engines.
        self._expected: dict[str | None, Logprobs] = {}
        self._asking = threading.Lock()

    async def start(self) -> None:
        if self._agent is None:
            await self._pool.start()
            return
        try:
            # The gateway first: what can fail there fails at once, an engine takes minutes.
            await self._agent.start()
            await self._pool.start()
        except BaseException:
            await self._agent.close()
            raise

    async def generate(
        self, prompts: Sequence[Prompt], *, step: int, phase: str
    ) -> list[Trajectory]:
        # For the seeds, which must not depend on when an update of the weights comes.
        if phase == "train":
            version = step
        else:
            version = self._gate.version
        return await run_groups(self._runner, prompts, phase=phase, policy_version=version)

    async def sleep(self, policy: Policy) -> None:
        if not self._sharing.sleeps:
            return
        async with self._gate.hold_closed(self._pool.release):
            await self._sharing.begin_update(policy)

    async def update_weights(self, policy: Policy, *, version: int) -> dict[str, float]:
        def make_probe(engine: Engine) -> Probe:
            return self.make_probe(engine, policy)

        self._expected.clear()
        in_flight = self._config.trainer.fully_async.weight_update == "in_flight"
        if in_flight:
            interrupt = self._pool.interrupt
        else:
            interrupt = self._pool.release
        async with self._gate.hold_closed(interrupt) as inside:
            await self._sharing.before_sync(policy, lambda: self._compute_probe(policy))
            if self._updated or self._starts_without_policy or self._sharing.sends_first:
                report = await self._pool.update(
                    self._weights(policy), make_probe, frozen=policy.frozen_parts
                )
            else:
                # The first time, an engine of this process has the weights of the model's folder.
                report = await self._pool.verify(make_probe)
            self._updated = True
            self._gate.version = version
        if in_flight:
            self._interrupted += inside
        return sync_metrics(report, self._pool.reports) | self._sharing.metrics(policy)

    async def wait_for_fault(self) -> None:
        await self._pool.wait_for_fault()

    async def repair(self, policy: Policy | None, *, version: int) -> None:
        if policy is None:
            await self._pool.restart()
            return
        # The policy does not change meanwhile: a new engine gets the weights of the others.
        # Weights of another version than the samples' would be reported as theirs.
        assert version == self._gate.version
        await self._pool.repair(
            self._weights(policy),
            lambda engine: self.make_probe(engine, policy),
            frozen=policy.frozen_parts,
        )

    def activity(self, uids: Sequence[str]) -> list[str]:
        now = self.board.clock()
        return [
            *self._pool.activity(),
            *(entry.describe(now) for entry in self.board.oldest(list(uids))),
        ]

    def faults(self) -> dict[str, float]:
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
        if self._agent is not None:
            await self._agent.close()
        await self._pool.close()
        await self._environments.close()

    def _compute_probe(self, policy: Policy) -> None:
        for name, one in self._policies(policy).items():
            self._trainer_logprobs(one, name)

    @property
    def _starts_without_policy(self) -> bool:
        """Whether engines start with other weights than the policy's, such as LoRA's base."""
        return self._config.trains_adapter or not self._pool.start_with_model

    def _weights(self, policy: Policy) -> Weights:
        """Return the policy's weights, which can be read several times."""
        if self._memory is not None and policy.device.type == "cpu" and not policy.has_adapter:
            self._memory.adopt(tensor for _, tensor in weights_of(policy.model))
        is_adapter = self._config.engine_weights is EngineWeights.ADAPTER
        weights = policy.named_weights(self._pool.weights_dtype, adapter=is_adapter)
        return self._sharing.weights(policy, weights)

    def _policies(self, policy: Policy) -> dict[str | None, Policy]:
        return {name: policy.with_adapter(name) for name in self._config.policies} or {None: policy}

    def _trainer_logprobs(self, policy: Policy, name: str | None) -> Logprobs:
        with self._asking:
            if name not in self._expected:
                self._expected[name] = policy.sequence_logprobs(self.probe_sequences)
            return self._expected[name]

    def make_probe(self, engine: Engine, policy: Policy) -> Probe:
        """Return what compares an engine with the policy, or with each of several."""
        probes = []
        for name, one in self._policies(policy).items():
            probes.append(self._make_policy_probe(engine, one, name))
        if self._config.policies:
            return PolicyProbes(probes)
        return probes[0]

    def _make_policy_probe(self, engine: Engine, policy: Policy, name: str | None) -> WeightProbe:
        chosen = self._config.engine_dtype
        if chosen == "auto":
            dtype = policy.dtype
        else:
            dtype = getattr(torch, chosen)
        tolerance = self._config.trainer.sync_tolerance
        if policy.router_replay:
            replayed_logprobs = policy.sequence_logprobs
        else:
            replayed_logprobs = None
        if tolerance:
            limits = ProbeLimits(maximum=tolerance)
        else:
            limits = None
        return WeightProbe(
            engine,
            probe=self.probe_sequences,
            trainer_logprobs=lambda _: self._trainer_logprobs(policy, name),
            replayed_logprobs=replayed_logprobs,
            dtype=dtype,
            limits=limits,
            policy=name,
        )

    @cached_property
    def probe_sequences(self) -> list[list[int]]:
        """Token ids of the first prompts, truncated; the engine samples one token after them."""
        sampling = self._config.generator.sampling_params
        longest = self._config.generator.max_input_length + sampling.max_generate_length - 1
        probe = []
        for prompt in self._probe_prompts:
            # Without the chat template: any text shows a stale layer.
            text = "\n".join(map(message_text, prompt.messages))
            ids = self._tokenizer.encode(text, add_special_tokens=False)
            ids = ids[: min(PROBE_TOKENS, longest)]
            # Each token but the first has a logprob.
            probe.append(ids if len(ids) > 1 else [0, 1])
        return probe


def sync_metrics(
    report: WeightSyncReport, of_engines: Mapping[int, WeightSyncReport]
) -> dict[str, float]:
    each = {}
    for engine, one in of_engines.items():
        for name, value in (("update_seconds", one.update_seconds), ("num_bytes", one.num_bytes)):
            each[f"sync/{name}_of_engine_{engine}"] = float(value)
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
