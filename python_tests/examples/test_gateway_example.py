"""The example's agents on scripted answers and a database of their own."""

import sqlite3
from pathlib import Path
from typing import Any

import pytest
from _gateway import played
from fake_envs import FakePrompt, says

from examples.gateway import sql_agent, two_policies

pytest.importorskip("openai")

LOOK = "<think> look </think> <sql> SELECT sql FROM sqlite_master </sql>"
SOLVE = "<think> easy </think> <solution> SELECT MAX ( price ) FROM boats </solution>"


@pytest.fixture
def prompt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakePrompt:
    folder = tmp_path / "SynSQL-2.5M" / "databases" / "one"
    folder.mkdir(parents=True)
    with sqlite3.connect(folder / "one.sqlite") as database:
        database.execute("CREATE TABLE boats (price INT)")
        database.execute("INSERT INTO boats VALUES (7)")
    database.close()
    monkeypatch.setattr(sql_agent, "DATABASES", {"db_path": str(tmp_path)})
    spec = {"ground_truth": "SELECT MAX(price) FROM boats"}
    messages = [{"role": "system", "content": "SQL"}, {"role": "user", "content": "highest price?"}]
    return FakePrompt(
        "p", messages, env_extras={"db_id": "one", "data": "synsql", "reward_spec": spec}
    )


@pytest.mark.parametrize("variant", ["openai", "langgraph"])
def test_agent_looks_and_solves(variant: str, prompt: FakePrompt, tiny_tokenizer: Any) -> None:
    solve = sql_agent.solve
    if variant == "langgraph":
        pytest.importorskip("langgraph")
        pytest.importorskip("langchain_openai")
        from examples.gateway import langgraph_agent

        langgraph_agent.DATABASES.update(sql_agent.DATABASES)
        solve = langgraph_agent.solve

    def answer(call: Any, n: int) -> Any:
        again = LOOK.replace("look", "again")
        text, stop = [(LOOK, "</sql>"), (again, "</sql>"), (SOLVE, "</solution>")][n]
        assert stop in call.sampling.stop
        return says(tiny_tokenizer, text, end=False, stop=stop)

    t = played(solve, tiny_tokenizer, answer=answer, prompts=[prompt], max_input_length=9000).only
    assert (t.failure, [s.reward for s in t.steps]) == (None, [0.0, 0.0, 1.0])
    last = tiny_tokenizer.decode(t.steps[-1].prompt_token_ids)
    looks = last.count("CREATE TABLE boats (price INT)")
    assert looks == (2 if variant == "openai" else 1)
    forks = (0, 2) if variant == "openai" else (1, 1)
    metrics = t.env_metrics
    assert (metrics["forked_prompts"], metrics["continued_prompts"]) == forks


def test_the_worker_answers_for_the_planner(prompt: FakePrompt, tiny_tokenizer: Any) -> None:
    two_policies.DATABASES.update(sql_agent.DATABASES)
    wrong = SOLVE.replace("MAX", "MIN")

    def answer(call: Any, n: int) -> Any:
        text, stop = [(LOOK, "</sql>"), (wrong, "</solution>"), (SOLVE, "</solution>")][n]
        return says(tiny_tokenizer, text, end=False, stop=stop)

    names = ("planner", "worker")
    out = played(
        two_policies.solve,
        tiny_tokenizer,
        answer=answer,
        prompts=[prompt],
        policies=names,
        max_input_length=9000,
    )
    t = out.only
    assert (t.failure, [s.reward for s in t.steps]) == (None, [0.0, 0.0, 1.0])
    assert [s.policy for s in t.steps] == ["planner", "planner", "worker"]
    planner, worker = (list(s.prompt_token_ids) for s in t.steps[1:])
    assert planner == worker  # it does not see what the planner would have answered
