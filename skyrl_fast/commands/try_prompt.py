"""The command `skyrl-fast try`: one prompt through the environment of a run, printed."""

from __future__ import annotations

import argparse
import asyncio
import faulthandler
import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from os.path import expanduser
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skyrl_fast.commands.command import (
    add_config_arguments,
    as_usage_error,
    count,
    load_settings,
    log_to_stderr,
    needs_extra,
    say,
)
from skyrl_fast.system.event_loop import run_coroutine
from skyrl_fast.system.printable import printable

if TYPE_CHECKING:
    from skyrl_fast.config import Config
    from skyrl_fast.rollout.env.handler import MakeEnv
    from skyrl_fast.rollout.env.observed_env import ObservedEnv, ObservedStep
    from skyrl_fast.rollout.policy_calls import PolicyCalls
    from skyrl_fast.rollout.trajectory import Trajectory
    from skyrl_fast.train.data.prompts import Prompt

DEFAULT_TIMEOUT = 2.0  # seconds of an environment's call; a run's is for slow ones under load
GRACE_SECONDS = 10.0  # beyond the timeout; then the environment holds Python's lock
PLACEHOLDER = "(a scripted answer; give others by --answers)"
MAX_SHOWN = 4_000  # characters of one text
FAILED = 1  # exit code


HELP = "play one prompt through the environment and print it"
DESCRIPTION = (
    "Run the agent loop on one training prompt, with scripted answers or the model's. Exit code 1: "
    "a trajectory failed."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config_arguments(parser)
    parser.add_argument("--prompt", type=int, default=0, help="row of the training prompts, from 0")
    parser.add_argument("--samples", type=count, default=1, help="trajectories of the prompt")
    parser.add_argument(
        "--answers",
        nargs="+",
        help="what the scripted model answers, turn by turn (then the last one again); @FILE: a "
        "JSON list, or one answer per line; section.key=value is an override here, too",
    )
    parser.add_argument(
        "--reward",
        metavar="MODULE:FUNCTION",
        help="reward function in place of the environment, as reward= of train_agent: "
        "module:function or file.py:function; each answer is a trajectory",
    )
    parser.add_argument(
        "--reward-funcs",
        nargs="+",
        metavar="MODULE:FUNCTION",
        help="the same for reward_funcs= of train_agent, with weight 1 each",
    )
    parser.add_argument(
        "--timeout",
        type=float,
        help="seconds for each call of the environment; default: "
        f"{DEFAULT_TIMEOUT:g}, with --engine environment.timeout_seconds",
    )
    parser.add_argument(
        "--tokenizer",
        action="store_true",
        help="use the model's tokenizer and chat template, not a plain one",
    )
    parser.add_argument(
        "--engine", action="store_true", help="sample from the model by vLLM, not from a script"
    )


def run(options: argparse.Namespace) -> int:
    log_to_stderr()
    _divide_words(options)
    config = _limit_attempts(load_settings(options.config, options.overrides), options)
    from skyrl_fast.config.files import check_data_files
    from skyrl_fast.config.loading import check_without_adapter

    if options.engine:
        check_without_adapter(config, "skyrl-fast try --engine")
    check_data_files("data.train_data", config.data.train_data)
    with needs_extra("train"):
        from skyrl_fast.train.algorithm.batch_warnings import unread_rewards
    with as_usage_error(ValueError, OSError, ImportError):
        given_env = _load_rewards(config, options)
        prompt = _prompt(config, options.prompt, given_env)
        if options.engine:
            play = _run_sampled
        else:
            play = partial(_run_scripted, options=options)
        attempt = run_coroutine(play(config, prompt, given_env))
    sys.stdout.write(_attempt_text(attempt))
    unread = unread_rewards(config, attempt.trajectories)
    if unread is not None:
        sys.stdout.write(f"\nwarning: {unread}\n")
    if any(t.failure is not None for t in attempt.trajectories):
        return FAILED
    return 0


@dataclass(frozen=True, slots=True)
class _Attempt:
    """A prompt's trajectories; `observed`: steps of each environment, also of a failed call."""

    prompt: Prompt
    tokenizer: Any
    trajectories: list[Trajectory]
    observed: list[list[ObservedStep]]


def _divide_words(options: argparse.Namespace) -> None:
    """Take the words after --answers that are section.key=value as overrides of settings."""
    from skyrl_fast.config import Config

    if options.answers is not None:
        sections = "|".join(item.name for item in fields(Config))
        is_override = re.compile(rf"({sections})\.[\w.-]+=").match
        options.overrides += [word for word in options.answers if is_override(word)]
        options.answers = [word for word in options.answers if not is_override(word)]


def _answers(given: Sequence[str] | None) -> list[str]:
    if given is None:
        return [PLACEHOLDER]
    if not given:
        raise ValueError("--answers: expected an answer, got overrides of settings only")
    if len(given) != 1 or not given[0].startswith("@"):
        return list(given)
    text = Path(expanduser(given[0][1:])).read_text(encoding="utf-8")
    if text:
        lines = text.removesuffix("\n").split("\n")
    else:
        lines = []
    if text.lstrip().startswith("["):
        answers = json.loads(text)
    else:
        answers = lines
    if not answers or not all(isinstance(answer, str) for answer in answers):
        raise ValueError(
            f"--answers: expected a list of strings in {given[0][1:]}, got {answers!r}"
        )
    return answers


def _limit_attempts(config: Config, options: argparse.Namespace) -> Config:
    """Return the settings for one attempt at each trajectory, one after the other."""
    # Environments run in threads, because the calls of a thread can be named when it hangs.
    timeout = options.timeout
    if timeout is None:
        if options.engine:
            timeout = config.environment.timeout_seconds
        else:
            timeout = DEFAULT_TIMEOUT
    environment = replace(config.environment, timeout_seconds=timeout, workers="thread")
    generator = replace(
        config.generator,
        n_samples_per_prompt=options.samples,
        max_retries=0,
        max_concurrent_trajectories=1,
    )
    return replace(config, environment=environment, generator=generator)


def _load_rewards(config: Config, options: argparse.Namespace) -> MakeEnv | None:
    """Return a factory of environments of the reward functions; None: the run's environment.

    Raises:
        SetupError: a function cannot be called as it will be, or both options are given.
        ValueError: a function cannot be imported.
    """
    from skyrl_fast.system.importing import load_setting_function
    from skyrl_fast.train.setup.given_objects import GivenObjects

    functions = []
    for name in options.reward_funcs or ():
        functions.append(load_setting_function("--reward-funcs", name))
    given = GivenObjects(
        "skyrl-fast try",
        reward=load_setting_function("--reward", options.reward),
        reward_funcs=functions or None,
    )
    return given.write_into(config)


def _prompt(config: Config, number: int, given_env: MakeEnv | None) -> Prompt:
    from skyrl_fast.rollout.env.reward_functions import RewardFunctions
    from skyrl_fast.train.data.prompts import load_prompts
    from skyrl_fast.train.setup.run_data import text_marked

    env_class = config.environment.env_class
    prompts = load_prompts(config.data.train_data, default_env_class=env_class)
    if not 0 <= number < len(prompts):
        raise ValueError(f"--prompt: expected a row from 0 to {len(prompts) - 1}, got {number}")
    prompt = prompts[number]
    if isinstance(given_env, RewardFunctions):
        (prompt,) = text_marked([prompt])
        given_env.check_arguments([prompt.env_extras])
    if given_env is not None:
        prompt = replace(prompt, env_class=env_class)
    return prompt


async def _run_scripted(
    config: Config, prompt: Prompt, given_env: MakeEnv | None, *, options: argparse.Namespace
) -> _Attempt:
    from skyrl_fast.rollout.engine.weights.gate import WeightGate
    from skyrl_fast.rollout.env.factory import EnvFactory, check_env_classes
    from skyrl_fast.rollout.env.reward_functions import GroupRewards, RewardFunctions
    from skyrl_fast.rollout.groups import environment_runner, run_groups
    from skyrl_fast.rollout.loop_settings import loop_settings
    from skyrl_fast.rollout.policy_calls import PolicyCalls
    from skyrl_fast.rollout.scripted import PlainTokenizer, ScriptedModel

    if options.tokenizer:
        tokenizer = _tokenizer(config)
    else:
        tokenizer = PlainTokenizer()
    answers = _answers(options.answers)
    if given_env is not None:  # a task of one turn
        samples = max(options.samples, len(answers))
        config = replace(config, generator=replace(config.generator, n_samples_per_prompt=samples))
    model = ScriptedModel(answers, tokenizer, one_each=given_env is not None)
    calls = PolicyCalls(
        model,
        WeightGate(),
        tokenizer,
        config.trainer.seed,
        config.call_names,
        are_roles=bool(config.roles),
    )
    if config.agent.is_set:
        trajectories = await _run_agent(config, calls, prompt)
        return _Attempt(prompt, tokenizer, trajectories, observed=[])
    observed: list[list[ObservedStep]] = []
    make_env = _make_observed(config, prompt, observed, given_env)
    factory = EnvFactory(config.environment, make_env=make_env)
    on_group = None
    if isinstance(given_env, RewardFunctions):
        on_group = GroupRewards(factory)
    watching = asyncio.create_task(_watch(config.environment.timeout_seconds + GRACE_SECONDS))
    try:
        if given_env is None:
            check_env_classes([prompt.env_class], config.environment)  # which `make_env` replaces
        runner = environment_runner(calls, factory, loop_settings(config), on_group=on_group)
        trajectories = await run_groups(runner, [prompt], phase="train", policy_version=0)
    finally:
        await factory.close()
        watching.cancel()
    return _Attempt(prompt, tokenizer, trajectories, observed)


async def _run_agent(config: Config, calls: PolicyCalls, prompt: Prompt) -> list[Trajectory]:
    from skyrl_fast.gateway.start import gateway_agent
    from skyrl_fast.rollout.group_runner import GroupRunner
    from skyrl_fast.rollout.groups import run_groups
    from skyrl_fast.rollout.loop_settings import loop_settings

    loop = loop_settings(config)
    agent = gateway_agent(config.agent, calls, loop)
    await agent.start()
    try:
        runner = GroupRunner(agent, loop, board=agent.policy.board)
        return await run_groups(runner, [prompt], phase="train", policy_version=0)
    finally:
        await agent.close()


async def _run_sampled(config: Config, prompt: Prompt, given_env: MakeEnv | None) -> _Attempt:
    from skyrl_fast.config.model_folder import model_folder
    from skyrl_fast.train.flow.vllm_rollouts import start_rollouts

    tokenizer = _tokenizer(config)
    Path(config.trainer.run_path).mkdir(parents=True, exist_ok=True)  # for engine.log
    observed: list[list[ObservedStep]] = []
    rollouts = await start_rollouts(
        config,
        tokenizer,
        str(model_folder(str(config.trainer.policy.model.path))),
        prompts=[prompt],
        make_env=_make_observed(config, prompt, observed, given_env),
        say=say,
    )
    try:
        trajectories = await rollouts.generate([prompt], step=0, phase="train")
    finally:
        await rollouts.close()
    return _Attempt(prompt, tokenizer, trajectories, observed)


def _tokenizer(config: Config) -> Any:
    from skyrl_fast.train.model.loading import load_tokenizer

    return load_tokenizer(str(config.trainer.policy.model.path))


def _make_observed(
    config: Config,
    prompt: Prompt,
    observed: list[list[ObservedStep]],
    given_env: MakeEnv | None,
) -> MakeEnv:
    """Return a factory of the prompt's environment; each one adds a list of its steps.

    Args:
        given_env: that of reward functions, whose rewards come after the last step of a group, so
            that there is nothing to observe in one; None: the prompt's `env_class`.
    """
    from skyrl_fast.rollout.env.factory import gym_settings
    from skyrl_fast.rollout.env.handler import create_env
    from skyrl_fast.rollout.env.observed_env import ObservedEnv
    from skyrl_fast.rollout.env.reward_functions import RewardFunctions

    if isinstance(given_env, RewardFunctions):
        return given_env

    def make(extras: dict[str, Any]) -> ObservedEnv:
        observed.append([])
        if given_env is None:
            env = create_env(prompt.env_class, gym_settings(config.environment.skyrl_gym), extras)
        else:
            env = given_env(extras)
        return ObservedEnv(env, observed[-1])

    return make


async def _watch(seconds: float) -> None:
    """End the process, with the place of each thread, if the event loop stops for so long."""
    # The deadlines of environments do not reach code that holds Python's lock; this one does.
    try:
        while True:
            faulthandler.dump_traceback_later(seconds, exit=True)
            await asyncio.sleep(1.0)
    finally:
        faulthandler.cancel_dump_traceback_later()


# --- text ---------------------------------------------------------------------------------------


def _attempt_text(attempt: _Attempt) -> str:
    """Return the trajectories as text for a terminal: cut if long, control characters escaped."""
    blocks = []
    for number, trajectory in enumerate(attempt.trajectories):
        if number < len(attempt.observed):
            observed = attempt.observed[number]
        else:
            observed = []
        if len(attempt.trajectories) > 1:
            lines = [f"sample {number}"]
        else:
            lines = []
        lines += [f"environment: {trajectory.env_class}", *_prompt_lines(attempt, trajectory)]
        for turn, step in enumerate(observed):
            lines += _turn_lines(turn + 1, step)
        if not observed:  # an agent makes no observation
            for turn, call in enumerate(trajectory.steps):
                lines += [f"call {turn + 1}", *_entry("answer", call.text)]
        lines += [*_end_lines(trajectory), *_plain_lines(attempt, trajectory)]
        blocks.append("\n".join(lines) + "\n")
    return "\n".join(blocks)


def _plain_lines(attempt: _Attempt, trajectory: Trajectory) -> list[str]:
    """Return what a plain tokenizer does otherwise than the model's, where it matters."""
    from skyrl_fast.rollout.scripted import PlainTokenizer
    from skyrl_fast.rollout.stop_reason import LENGTH

    tokenizer = attempt.tokenizer
    if not isinstance(tokenizer, PlainTokenizer):
        return []
    lines = []
    if trajectory.stop_reason == LENGTH:
        lines.append(
            "tokens are those of a plain tokenizer, shorter than a model's: --tokenizer uses "
            "the model's own"
        )
    if any(tokenizer.shows_tools(step.prompt_token_ids) for step in trajectory.steps):
        lines.append(
            "the tools are in the prompt of a plain tokenizer, and the model's chat template may "
            "leave them out: --tokenizer shows what it writes"
        )
    return lines


def _prompt_lines(attempt: _Attempt, trajectory: Trajectory) -> list[str]:
    from skyrl_fast.rollout.chat_template import message_text

    if trajectory.steps:
        text = attempt.tokenizer.decode(list(trajectory.steps[0].prompt_token_ids))
    else:
        text = "\n".join(f"[{m['role']}] {message_text(m)}" for m in attempt.prompt.messages)
    return _entry("prompt", text, indent="")


def _turn_lines(number: int, step: ObservedStep) -> list[str]:
    lines = [f"turn {number}", *_entry("answer", step.action)]
    answer = step.answer
    if answer is None:
        return [*lines, "  the environment gave no answer"]
    if isinstance(answer, Mapping):
        given = answer
    else:
        given = _fields(answer)
    for name, value in given.items():
        if not _is_empty(value):
            lines += _entry(name.removesuffix("s") if name == "observations" else name, value)
    return lines


def _is_empty(value: Any) -> bool:
    """Return whether a field says nothing; a reward of 0 does."""
    return value is None or (isinstance(value, str | list | tuple | Mapping) and not len(value))


def _fields(answer: Any) -> dict[str, Any]:
    names = ("observations", "reward", "done", "postprocessed_action", "policy", "policy_rewards")
    return {name: getattr(answer, name, None) for name in names}


def _end_lines(trajectory: Trajectory) -> list[str]:
    if trajectory.failure is not None:
        return _entry(f"failed ({trajectory.stop_reason})", trajectory.failure, indent="")
    rewards = [f"{step.reward:g}" for step in trajectory.steps]
    lines = [f"rewards: {' '.join(rewards) or 'none'}; ended by {trajectory.stop_reason}"]
    if not rewards:
        lines.append("the prompt is longer than generator.max_input_length")
    if trajectory.env_metrics:
        lines.append(f"metrics: {printable(str(trajectory.env_metrics), MAX_SHOWN)}")
    return lines


def _entry(name: str, value: Any, *, indent: str = "  ") -> list[str]:
    text = printable(str(value).strip(), MAX_SHOWN).replace("\n", f"\n{indent}  ")
    return [f"{indent}{name}: {text}"]
