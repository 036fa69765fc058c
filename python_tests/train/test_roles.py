"""Roles that one policy plays: each is compared with itself alone, all are trained together."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from _gateway import USER, played
from _settings import NEEDED
from _training import RESUME, Recorder, assert_same_files, dies_at, dying, settings, steady, train
from _training import folder as folder
from fake_envs import FakePrompt, ScriptedEngine, loop_config, says

from skyrl_fast.config import Config, ConfigError, EnvironmentConfig, load_config
from skyrl_fast.rollout.engine.weights.gate import WeightGate
from skyrl_fast.rollout.env.factory import EnvFactory
from skyrl_fast.rollout.env.protocol import Action, Env, EnvStep
from skyrl_fast.rollout.groups import environment_runner, run_groups
from skyrl_fast.rollout.policy_calls import PolicyCalls
from skyrl_fast.rollout.trajectory import Step, Trajectory
from skyrl_fast.train.algorithm.policies import join_roles, split_by_policy
from skyrl_fast.train.output.loggers import read_metrics
from skyrl_fast.train.prepare_batch import training_batch, with_advantages
from skyrl_fast.trajectory_store import read_trajectories

SIDES = ("white", "black")
ROLES = "trainer.policy.roles=[white,black]"
LORA = "trainer.policy.model.lora"
ESTIMATOR = "trainer.algorithm.advantage_estimator"


def config(*overrides: str) -> Config:
    return load_config(None, [*NEEDED, *overrides])


def step(token: int, role: str | None, reward: float = 0.0, **more: Any) -> Step:
    return Step([1], [token], [1], [-1.0], reward, "stop", 0, "", "", 0.0, 0.0, policy=role, **more)


def game(number: int, outcome: float, *moves: str) -> Trajectory:
    """Return a game of these moves, by role, with white's outcome and black's, its negative."""
    steps = [step(5, role) for role in moves or ("white", "black", "white")]
    outcomes = {"white": outcome, "black": -outcome}
    return Trajectory("a", number, steps, policy_rewards=outcomes)


def advantages(trajectories: list[Trajectory], chosen: Config) -> dict[str, list[float]]:
    """Return the advantages of the rows of each group."""
    batch, units, _ = training_batch(trajectories, chosen)
    batch, _, _ = with_advantages(
        batch, units, chosen.trainer.algorithm, policy=None, reference=None, critic=None,
        kl_coef=0.0,
    )  # fmt: skip
    found: dict[str, list[float]] = {}
    for uid, value in zip(batch.row_uids, batch.advantages.tolist(), strict=True):
        found.setdefault(uid, []).append(value)
    return found


GAMES = [game(0, 1.0), game(1, 1.0), game(2, -1.0)]
WHITE = [2 / 3] * 4 + [-4 / 3] * 2  # of two moves in each game
BLACK = [-2 / 3, -2 / 3, 4 / 3]


@pytest.mark.spec("roles.groups", "roles.worked-example")
def test_a_role_is_compared_with_itself_alone() -> None:
    joined, uids = join_roles(split_by_policy(GAMES, SIDES))
    assert uids == ["a"] * 6
    found = advantages(joined, config(ROLES, f"{ESTIMATOR}=dr_grpo"))
    assert found == {"a/white": pytest.approx(WHITE), "a/black": pytest.approx(BLACK)}


@pytest.mark.spec("advantage.policy-groups")
def test_each_of_several_policies_is_compared_with_itself_alone() -> None:
    names = f"{LORA}.policies=[white,black]"
    chosen = config(f"{LORA}.rank=4", names, f"{ESTIMATOR}=dr_grpo")
    parts = split_by_policy(GAMES, SIDES)
    assert advantages(parts["white"], chosen) == {"a": pytest.approx(WHITE)}
    assert advantages(parts["black"], chosen) == {"a": pytest.approx(BLACK)}


@pytest.mark.spec("advantage.policy-groups", "roles.groups")
def test_a_role_without_a_move_has_no_sample() -> None:
    # Black resigns its first game before a move: its mean is that of the others.
    games = [game(0, 1.0, "white"), *GAMES[1:]]
    joined, _ = join_roles(split_by_policy(games, SIDES))
    found = advantages(joined, config(ROLES, f"{ESTIMATOR}=dr_grpo"))
    assert found["a/black"] == [-1.0, 1.0]
    assert found["a/white"] == pytest.approx(WHITE[1:])


@pytest.mark.spec("roles.groups")
def test_filters_compare_a_role_with_itself() -> None:
    games = [game(0, 1.0), game(1, 1.0)]
    games[1].policy_rewards["black"] = 0.0
    joined, _ = join_roles(split_by_policy(games, SIDES))
    filtered = "trainer.algorithm.zero_variance_filter=true"
    batch, _, metrics = training_batch(joined, config(ROLES, filtered))
    by_uid = dict(zip(batch.row_uids, batch.loss_mask.tolist(), strict=True))
    assert by_uid == {"a/white": 0, "a/black": 1}
    assert metrics["reward/num_zero_variance_filtered"] == 1


def test_a_prompt_has_a_group_for_each_role() -> None:
    other = Trajectory("b", 0, [step(5, "white")])
    joined, uids = join_roles(split_by_policy([*GAMES, other], SIDES))
    assert list(dict.fromkeys(one.uid for one in joined)) == [
        "a/white", "a/black", "b/white", "b/black",
    ]  # fmt: skip
    assert [len(one.steps) for one in joined] == [2, 2, 2, 1, 1, 1, 1, 0]
    assert uids == ["a"] * 6 + ["b"] * 2
    assert [one.uid for one in GAMES] == ["a"] * 3  # as they were


# --- calls ------------------------------------------------------------------------------------


class Game(Env):
    def step(self, action: Action) -> EnvStep:
        self.moves = getattr(self, "moves", 0) + 1
        if self.moves == 1:
            return EnvStep(0.0, done=False, policy="black")
        return EnvStep(0.0, done=True, policy_rewards={"white": -1.0, "black": 1.0})


def played_game(tokenizer: Any, roles: tuple[str, ...]) -> tuple[Trajectory, ScriptedEngine]:
    engine = ScriptedEngine(lambda call, n: says(tokenizer, f"a{n}"))

    async def go() -> list[Trajectory]:
        factory = EnvFactory(EnvironmentConfig(), make_env=lambda row: Game(), longest_text=1000)
        calls = PolicyCalls(engine, WeightGate(), tokenizer, 0, roles, are_roles=True)
        runner = environment_runner(calls, factory, loop_config(max_turns=9, max_retries=0))
        try:
            return await run_groups(runner, [FakePrompt("a")], phase="train", policy_version=0)
        finally:
            await factory.close()

    (trajectory,) = asyncio.run(go())
    return trajectory, engine


@pytest.mark.spec("roles.calls")
def test_an_environment_names_the_role_and_the_same_weights_answer(tiny_tokenizer: Any) -> None:
    trajectory, engine = played_game(tiny_tokenizer, SIDES)
    assert [one.policy for one in trajectory.steps] == ["white", "black"]
    assert [call.policy for call in engine.calls] == [None, None]
    assert trajectory.policy_rewards == {"white": -1.0, "black": 1.0}
    refused, _ = played_game(tiny_tokenizer, ("white", "red"))
    assert "policy: expected one of white, red, got 'black'" in str(refused.failure)


@pytest.mark.spec("roles.calls")
def test_an_agent_names_the_role_by_the_model_of_a_call(
    tiny_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def agent(task: Any) -> dict[str, Any]:
        async with task.async_openai as client:
            for name in (task.model, "black", "judge"):
                await client.chat.completions.create(model=name, messages=[USER])
        return {"reward": 0.0, "policy_rewards": {"white": 1.0, "black": -1.0}}

    monkeypatch.setattr("_gateway.PolicyCalls", lambda *given: PolicyCalls(*given, are_roles=True))
    out = played(agent, tiny_tokenizer, policies=SIDES, untrained_models=("judge",))
    assert [one.policy for one in out.only.steps] == ["white", "black"]
    assert [call.policy for call in out.engine.calls] == [None] * 3
    assert out.only.policy_rewards == {"white": 1.0, "black": -1.0}
    assert [call.model for call in out.only.other_calls] == ["judge"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            [ROLES, f"{LORA}.rank=4", f"{LORA}.policies=[planner,worker]"],
            "roles: expected .. with .*policies=.*, as each policy has one role, its name",
        ),
        (
            [ROLES, f"{ESTIMATOR}=gae", "trainer.critic.model.path=m"],
            "roles: expected .. with .*critic.model.path=m, as a critic's mini-batches do not",
        ),
        (["trainer.policy.roles=[white]"], "roles: expected none, or several different names"),
        (["trainer.policy.roles=[white,white]"], "roles: expected none, or several different"),
        (["trainer.policy.roles=[white,b/w]"], "roles: expected none, or several .* got 'white', "),
        (
            [ROLES, "agent.function=a:b", "agent.untrained_models=[white]"],
            "untrained_models: expected other names than .* trainer.policy.roles, got 'white'",
        ),
    ],
)
def test_roles_that_mean_nothing_are_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config(*overrides)


# --- full runs ---------------------------------------------------------------------------------


def play(rollouts: Any, trajectories: list[Trajectory], phase: str) -> None:
    """Let white answer first and black then; who says the prompt's word wins."""
    for one in trajectories:
        word = one.steps[0].prompt_token_ids[1]
        won = {}
        for turn, role in zip(one.steps, SIDES, strict=True):
            turn.policy = role
            turn.reward = 0.0
            won[role] = float(word in turn.response_ids)
        difference = won["white"] - won["black"]
        one.policy_rewards = {"white": difference, "black": -difference}


RUN = [ROLES, "trainer.epochs=3", "data.val_data=[]"]


@pytest.mark.spec("roles.mini-batches", "roles.metrics")
@pytest.mark.parametrize("staleness", [0, 1])
def test_all_roles_are_trained_together(folder: Path, staleness: int) -> None:
    more = [
        "trainer.epochs=1",
        f"trainer.fully_async.enabled={'true' if staleness else 'false'}",
        f"trainer.fully_async.max_staleness_steps={staleness}",
    ]
    outcome = train(settings(folder, "run", *RUN, *more), Recorder(None, play))
    rows = read_metrics(outcome.metrics)
    assert [row["step"] for row in rows] == [1, 2]
    for row in rows:
        assert row["policy/optimizer_steps"] == 2  # four prompts by two, as without roles
        assert row["policy/grad_norm"] > 0
        white, black = (row[f"{role}/reward/avg_raw_reward"] for role in SIDES)
        assert white == -black
        assert row["reward/avg_raw_reward"] == 0.0
        assert row["white/generate/batch_num_seq"] == 16
    stored = list(read_trajectories(outcome.run_path, phase="train"))
    assert {one.entry.uid for one in stored} == {str(number) for number in range(8)}
    for one in stored:
        assert [turn.turn["policy"] for turn in one.steps] == list(SIDES)
        assert all(np.isfinite(turn.advantages).all() for turn in one.steps)
    assert max(np.abs(turn.advantages).max() for one in stored for turn in one.steps) > 0


def test_a_run_of_roles_is_resumed(folder: Path) -> None:
    expected = train(settings(folder, "expected", *RUN), Recorder(None, play))
    with dying():
        train(settings(folder, "broken", *RUN), Recorder(dies_at(3), play))
    outcome = train(settings(folder, "broken", *RUN, RESUME), Recorder(None, play))
    assert_same_files(outcome, expected, "policy/model.safetensors", "optimizer.safetensors")
    assert steady(outcome.metrics) == steady(expected.metrics)


def test_a_batch_without_a_role_is_warned_of(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    short = settings(folder, "run", *RUN, "trainer.max_training_steps=1")
    assert train(short, Recorder()).step == 1
    assert "no policy was called for this batch" in caplog.text
