"""Tasksets of the package verifiers (0.3 and later) as agents at the gateway.

There an environment is a taskset with a harness: a program that calls the model through a relay,
which sends its calls to the gateway. Earlier versions: `verifiers_agent`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from skyrl_fast.gateway.agents.task import AgentTask

INDEX = "verifiers_task"  # column with a task's number in the taskset


class VerifiersTasks:
    """An agent for `agent.function`: each task is one episode of the environment.

    Its reward and metrics are those of the episode's trace, so the environment has one agent.

    Args:
        env: the settings of the environment, as in verifiers' own configuration files.

    Example:
        # gsm.py, used with agent.function=gsm.py:agent
        harness = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}
        agent = VerifiersTasks({"taskset": {"id": "gsm8k"}, "agent": harness})
        rows = agent.rows(1000)
        # skyrl_fast.train_agent(config, agent="gsm.py:agent", prompts=rows)
    """

    def __init__(self, env: Mapping[str, Any]) -> None:
        from verifiers.v1.utils.loaders import load_taskset, resolve_env_config

        self._config = resolve_env_config(dict(env))
        self._loading: Iterator[Any] = iter(load_taskset(self._config.taskset))
        self._loaded: list[Any] = []

    def rows(self, number: int) -> list[dict[str, Any]]:
        """Return the first tasks as rows, fewer if there are no more."""
        found = []
        for index in range(number):
            task = self._task(index)
            if task is None:
                break
            data = task.data
            text = data.prompt_text or str(data.name or index)
            message = {"role": "user", "content": text}
            found.append({"prompt": [message], INDEX: index})
        return found

    async def __call__(self, task: AgentTask) -> dict[str, float]:
        """Return the reward and the metrics of one episode.

        Raises:
            RuntimeError: it failed, or had several agents.
        """
        from verifiers.v1.clients import EvalClientConfig, ModelContext
        from verifiers.v1.utils.loaders import load_environment

        # The relay sends the key of a variable as bearer: this header names the trajectory.
        endpoint = EvalClientConfig(
            base_url=task.base_url,
            api_key_var="SKYRL_FAST_NO_KEY",
            headers={"x-api-key": task.api_key},
        )
        env = load_environment(self._config)  # one at a time serves an episode
        async with env.serving():
            context = ModelContext(model=task.model, client=endpoint)
            index = int(task.row[INDEX])
            episode = await env.run_episode(self._task(index), context)
        errors = [*episode.errors]
        for trace in episode.traces:
            errors += trace.errors
        if errors and not episode.ok:
            first = errors[0]
            raise RuntimeError(f"verifiers: {first.type}: {first.message}")
        number = len(episode.traces)
        if number != 1:
            raise RuntimeError(
                f"verifiers: expected an environment of one agent, got {number} runs"
            )
        (trace,) = episode.traces
        found = {name: reward.score for name, reward in trace.rewards.items() if reward}
        found |= trace.metrics
        scores = {}
        for name, value in found.items():
            if value is not None:
                scores[name] = float(value)
        scores["reward"] = float(trace.reward)
        return scores

    def _task(self, index: int) -> Any:
        """Return a task by its number; None: there are fewer."""
        while len(self._loaded) <= index:
            task = next(self._loading, None)
            if task is None:
                return None
            self._loaded.append(task)
        return self._loaded[index]
