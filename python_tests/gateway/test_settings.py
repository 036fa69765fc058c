"""Settings of agents: which exclude each other, and what they name."""

from pathlib import Path
from typing import Any

import pytest

from skyrl_fast.config import AgentConfig, ConfigError
from skyrl_fast.config.loading import load_config
from skyrl_fast.gateway.agents.command import CommandAgent
from skyrl_fast.gateway.agents.function import FunctionAgent
from skyrl_fast.gateway.agents.outcome import OutcomeError, outcome_of
from skyrl_fast.gateway.messages import Outcome
from skyrl_fast.gateway.start import black_box

NEEDED = ["data.train_data=[a.jsonl]", "trainer.policy.model.path=m"]


@pytest.mark.spec("gateway.forest")
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            ["agent.function=a:b", "agent.command=[ls]"],
            r"agent.command: expected \[\] with agent.fu",
        ),
        (["agent.verifier=[ls]"], "agent.command: expected a command with agent.verifier="),
        (
            ["agent.function=a:b", "agent.reward_file=r"],
            "agent.command: expected a command with agent.reward_file=r",
        ),
        (
            ["agent.function=a:b", "trainer.rows=trajectory"],
            "trainer.rows: expected step or merged with agent.function=a:b",
        ),
        (["agent.port=70000"], "agent.port"),
    ],
)
def test_settings_that_exclude_each_other(settings: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(None, [*NEEDED, *settings])


def test_names_are_found_before_anything_is_loaded(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def agent(task): return 1.0\nnumber = 3\n")
    assert isinstance(black_box(AgentConfig(function=f"{file}:agent")), FunctionAgent)
    assert isinstance(black_box(AgentConfig(command=["ls"])), CommandAgent)
    with pytest.raises(ValueError, match=r"agent.function: .* has no 'other'"):
        black_box(AgentConfig(function=f"{file}:other"))
    with pytest.raises(ValueError, match="expected a function"):
        black_box(AgentConfig(function=f"{file}:number"))


@pytest.mark.spec("gateway.function-reward")
@pytest.mark.parametrize(
    ("value", "outcome"),
    [
        (None, Outcome()),
        (True, Outcome(1.0)),
        ({"reward": 2, "turns": 3}, Outcome(2.0, {"turns": 3.0})),
        ({"call_rewards": {"a": 0.5}}, Outcome(None, {}, {"a": 0.5})),
    ],
)
def test_outcomes(value: Any, outcome: Outcome) -> None:
    assert outcome_of(value) == outcome


@pytest.mark.parametrize(
    "value",
    [
        *("1", float("nan"), [1], 1e39, 10**400),
        *({"reward": "a"}, {"reward": -1e39}, {"call_rewards": 3}, {"call_rewards": {"a": 1e39}}),
        {"reward": 1.0, "score": float("inf")},
    ],
)
def test_outcomes_that_are_none(value: Any) -> None:
    with pytest.raises(OutcomeError):
        outcome_of(value)


def test_metrics_in_a_mapping_of_their_own_are_refused_with_the_right_form() -> None:
    with pytest.raises(OutcomeError, match=r"metrics: .*; each metric is a key of its own: \{"):
        outcome_of({"reward": 1.0, "metrics": {"turns": 3}})
