"""Gymnasium's environments as `Env`: text in, text out."""

from typing import Any

import numpy as np
import pytest
from fake_envs import FakePrompt, ScriptedEngine, loop_config, says

from skyrl_fast.adapters.gymnasium_env import GymnasiumEnvs
from skyrl_fast.config import EnvironmentConfig
from skyrl_fast.rollout.env.factory import EnvFactory
from skyrl_fast.rollout.groups import rollout

RULES = {"role": "user", "content": "Guess a number."}


class Guess:
    """The five methods of `gymnasium.Env`, without the package."""

    closed = 0

    def __init__(self, number: int) -> None:
        self.number = number
        self.tries = 0

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[str, dict[str, Any]]:
        assert type(seed) is int  # Gymnasium takes no other
        return f"seed {seed}, below {options['most']}", {}

    def step(self, action: int) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.tries += 1
        right = action == self.number
        hint = "higher" if action < self.number else "lower"
        return hint, float(right), right, self.tries == 3, {}

    def close(self) -> None:
        Guess.closed += 1


def number(text: str) -> int:
    if not text.isdigit():
        raise ValueError(f"{text!r} is no number")
    return int(text)


def played(factory: GymnasiumEnvs, tokenizer: Any, answers: list[str], row: dict[str, Any]) -> Any:
    import asyncio

    async def go() -> Any:
        envs = EnvFactory(EnvironmentConfig(), make_env=factory)
        engine = ScriptedEngine(lambda call, n: says(tokenizer, answers[n]))
        try:
            (trajectory,) = await rollout(
                [FakePrompt("p", [RULES], env_extras=row)],
                engine,
                tokenizer,
                envs,
                loop_config(max_turns=5),
                phase="train",
                policy_version=0,
                seed=1,
            )
        finally:
            await envs.close()
        return trajectory

    return asyncio.run(go())


@pytest.mark.spec("env.gymnasium")
def test_episode_of_an_environment(tiny_tokenizer: Any) -> None:
    Guess.closed = 0
    guesses = GymnasiumEnvs(lambda row: Guess(row["number"]), read_action=number, invalid_reward=-1)
    row = {"number": 7, "seed": 3, "options": {"most": 10}}
    trajectory = played(guesses, tiny_tokenizer, ["five", "5", "7"], row)
    assert trajectory.failure is None
    prompt = tiny_tokenizer.decode(trajectory.steps[0].prompt_token_ids)
    assert "user\nGuess a number.\n\nseed 3, below 10<|im_end|>" in prompt
    assert [step.reward for step in trajectory.steps] == [-1.0, 0.0, 1.0]
    assert [step.observation for step in trajectory.steps] == ["'five' is no number", "higher", ""]
    assert trajectory.env_metrics == {"return": 1.0, "invalid_actions": 1}
    assert Guess.closed == 1
    row["seed"] = np.int64(3)  # as in a table
    trajectory = played(guesses, tiny_tokenizer, ["1", "2", "3"], row)
    assert (trajectory.stop_reason, trajectory.env_metrics["return"]) == ("stop", 0.0)  # truncated


def test_an_observation_follows_the_text_of_a_prompt_in_parts() -> None:
    guesses = GymnasiumEnvs(lambda row: Guess(row["number"]), read_action=number)
    row = {"number": 7, "seed": 3, "options": {"most": 10}}
    for content, before in (([{"type": "text", "text": "Guess."}], "Guess.\n\n"), (None, "")):
        (message,) = guesses(dict(row)).init([{"role": "user", "content": content}])
        assert message["content"] == f"{before}seed 3, below 10"


@pytest.mark.peers
@pytest.mark.spec("env.gymnasium")
def test_environments_of_the_package(tiny_tokenizer: Any) -> None:
    gymnasium = pytest.importorskip("gymnasium")

    class Text(Guess, gymnasium.Env):
        action_space = gymnasium.spaces.Discrete(10)
        observation_space = gymnasium.spaces.Text(40)

        def reset(self, *, seed: Any = None, options: Any = None) -> Any:
            gymnasium.Env.reset(self, seed=seed)
            return f"below {self.np_random.integers(10, 11)}", {}

    gymnasium.register("Guess-v0", Text, max_episode_steps=2)
    made = GymnasiumEnvs(lambda row: gymnasium.make("Guess-v0", number=7), read_action=int)
    trajectory = played(made, tiny_tokenizer, ["5", "6"], {"seed": 1})
    assert "below 10" in tiny_tokenizer.decode(trajectory.steps[0].prompt_token_ids)
    assert [step.observation for step in trajectory.steps] == ["higher", ""]  # the time limit
    lake = GymnasiumEnvs(
        lambda row: gymnasium.make("FrozenLake-v1", is_slippery=False), read_action=int
    )
    trajectory = played(lake, tiny_tokenizer, ["1", "1", "2", "1", "2"], {})
    assert [step.observation for step in trajectory.steps] == ["4", "8", "9", "13", "14"]
