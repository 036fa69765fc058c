"""`skyrl-fast try`: one prompt through an environment, with scripted answers."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("omegaconf")

from skyrl_fast import cli

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/guide/environments.md").read_text(encoding="utf-8")
GUESS = PAGE.partition("```python\n# guess_env.py\n")[2].partition("```")[0]
AGENT_OF_FORMS = """
async def solve(task):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    for _ in range(2):
        await task.async_openai.chat.completions.create(
            model=task.model, messages=task.row["prompt"], response_format=form
        )
    return 1.0
"""
OTHERS = """
import time
import numpy as np

class Raises(Guess):
    def step(self, action):
        return super().step({}["oops"])

class Hangs(Guess):
    def step(self, action):
        time.sleep(60)

class Reports(Guess):
    def step(self, action):
        reward = np.mean([1, 0], dtype=np.float32)
        return {"observations": [], "reward": reward, "done": True, "metadata": {"seen": action}}

    def metrics(self):
        return {"guesses": 1}

class Talks(Guess):
    def step(self, action):
        return EnvStep(np.array(0.5), done=np.bool_(True), policy="b", policy_rewards={"b": 1})
"""


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    Path("guess_env.py").write_text(GUESS + OTHERS)
    rows = [
        {"prompt": f"Colour {n}?", "answer": answer} for n, answer in enumerate(("red", "blue"))
    ]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("guess.yaml").write_text(
        "data: {train_data: [rows.jsonl]}\n"
        "environment: {env_class: 'guess_env.py:Guess'}\n"
        "trainer: {policy: {model: {path: nosuch/model}}, run_path: run}\n"
        "generator: {max_turns: 3}\n"
    )
    return "guess.yaml"


@pytest.mark.spec("try.scripted")
def test_prints_the_turns_of_one_prompt(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["try", config, "--answers", "green", "red"]) == 0
    assert capsys.readouterr().out == (
        "environment: guess_env.py:Guess\n"
        "prompt: [user] Colour 0?<|end|>\n"
        "  [assistant]\n"
        "turn 1\n"
        "  answer: green\n"
        "  observation: No. Guess again.\n"
        "  reward: 0.0\n"
        "  done: False\n"
        "turn 2\n"
        "  answer: red\n"
        "  reward: 1.0\n"
        "  done: True\n"
        "rewards: 0 1; ended by stop\n"
    )


@pytest.mark.spec("try.scripted")
def test_answers_of_a_file_for_samples_of_another_prompt(
    config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("answers.txt").write_text("red\u2028\ngreen\nyellow\n")  # lines end with \n alone
    options = ["--prompt", "1", "--samples", "2", "--answers", "@answers.txt"]
    assert cli.main(["try", config, "generator.max_turns=2", *options]) == 0
    first, second = capsys.readouterr().out.split("\n\n")
    assert first.removeprefix("sample 0") == second.strip().removeprefix("sample 1")
    assert "Colour 1?" in first
    assert first.count("answer: ") == 2 and "answer: green" in first
    assert first.endswith("rewards: 0 0; ended by max_turns")


def test_prints_metadata_and_metrics(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["try", config, "environment.env_class=guess_env.py:Reports"]) == 0
    out = capsys.readouterr().out
    assert "  reward: 0.5\n  done: True\n" in out
    assert "  metadata: {'seen': '(a scripted answer; give others by --answers)'}\n" in out
    assert out.endswith("rewards: 0.5; ended by stop\nmetrics: {'guesses': 1}\n")


def test_prints_fields_of_policies(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["try", config, "environment.env_class=guess_env.py:Talks"]) == 1
    out = capsys.readouterr().out
    assert "reward: 0.5\n  done: True\n  policy: b\n  policy_rewards: {'b': 1}\n" in out


def test_a_prompt_of_parts_that_is_not_played_is_printed_as_text(
    config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    parts = [{"type": "text", "text": "Colour?"}, {"type": "text", "text": "Say."}]
    row = {"prompt": [{"role": "user", "content": parts}], "answer": "red"}
    Path("rows.jsonl").write_text(json.dumps(row))
    assert cli.main(["try", config, "generator.max_input_length=1"]) == 0
    assert "prompt: [user] Colour?\n  Say.\nrewards: none" in capsys.readouterr().out


def test_an_answer_that_is_cut_by_plain_tokens_says_so(
    config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    short = "generator.sampling_params.max_generate_length=2"
    for answer, is_cut in (("I do not know", True), ("red", False)):
        assert cli.main(["try", config, short, "--answers", answer]) == 0
        out = capsys.readouterr().out
        assert ("tokens are those of a plain tokenizer" in out) == is_cut


def test_settings_after_the_answers_are_overrides(
    config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["try", config, "--answers", "x=1", "generator.max_turns=2", "trainer.seed"]
    assert cli.main(command) == 0
    out = capsys.readouterr().out
    assert "turn 1\n  answer: x=1\n" in out and "turn 2\n  answer: trainer.seed\n" in out
    assert out.endswith("rewards: 0 0; ended by max_turns\n")


@pytest.mark.spec("try.failures")
def test_exception_has_file_and_line(
    config: str, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    assert cli.main(["try", config, "environment.env_class=guess_env.py:Raises"]) == 1
    out = capsys.readouterr().out
    line = 1 + (GUESS + OTHERS).splitlines().index('        return super().step({}["oops"])')
    assert out.endswith(
        "  the environment gave no answer\n"
        "failed (env_error): environment guess_env.py:Raises: step raised KeyError: 'oops'\n"
    )
    assert f'guess_env.py", line {line}, in step' in caplog.text


@pytest.mark.spec("try.failures")
def test_hang_is_stopped_and_has_file_and_line(
    config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "environment.env_class=guess_env.py:Hangs"
    assert cli.main(["try", config, name, "--timeout", "0.2"]) == 1
    line = 1 + (GUESS + OTHERS).splitlines().index("        time.sleep(60)")
    place = f'File "{Path.cwd()}/guess_env.py", line {line}, in step'
    assert f"did not return within 0.2 s; it was at: {place}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompt", "2"], "--prompt: expected a row from 0 to 1, got 2"),
        (["environment.env_class=nosuch.py:A"], "env_class of a row: cannot import 'nosuch.py'"),
        (["environment.env_class=nosuch"], "no environment of the name 'nosuch'"),
        (["--answers", "@nosuch.txt"], "No such file or directory: 'nosuch.txt'"),
        (["--answers", "@~nouser/x"], "No such file or directory: '~nouser/x'"),
        (["--answers", "generator.max_turn=3"], "did you mean generator.max_turns?"),
        (["--answers", "generator.max_turns=3"], "--answers: expected an answer, got overrides"),
        (["data.train_data=[~nouser/x.jsonl]"], "data file not found: ~nouser/x.jsonl"),
        (["--tokenizer", "trainer.policy.model.path=~nouser/x"], "folder not found: ~nouser/x"),
    ],
)
def test_wrong_arguments(
    config: str, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["try", config, *arguments]) == 2
    assert message in capsys.readouterr().err


def test_number_of_samples_is_at_least_1(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(["try", config, "--samples", "0"])
    assert "--samples: expected a whole number >= 1, got '0'" in capsys.readouterr().err


def test_imports_neither_engine_nor_transformers(config: str) -> None:
    code = (
        "import sys; from skyrl_fast.cli import main; assert main(['try', 'guess.yaml']) == 0; "
        "print(sorted({'vllm', 'transformers', 'skyrl_gym'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


AGENT = """
async def guess(task):
    messages = list(task.row["prompt"])
    for _ in range(2):
        answer = await task.async_openai.chat.completions.create(
            model=task.model, messages=messages
        )
        text = answer.choices[0].message.content
        if task.row["answer"] in text:
            return {"reward": 1.0, "guesses": 2}
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "No."}]
    raise LookupError("given up")
"""


@pytest.mark.spec("try.agent")
def test_an_agent_is_tried_with_scripted_answers(
    config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("openai")
    Path("guess_agent.py").write_text(AGENT)
    command = ["try", config, "agent.function=guess_agent.py:guess", "--answers"]
    assert cli.main([*command, "green", "red"]) == 0
    shown = capsys.readouterr().out
    assert "call 1\n  answer: green\ncall 2\n  answer: red\n" in shown
    assert "rewards: 0 1; ended by stop" in shown
    assert "'guesses': 2.0" in shown
    assert cli.main([*command, "green"]) == 1
    assert "failed (env_error): agent.function: LookupError: given up" in capsys.readouterr().out


async def test_it_runs_under_the_event_loop_of_a_notebook(
    config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["try", config, "--answers", "red"]) == 0
    assert "rewards: 1; ended by stop" in capsys.readouterr().out


@pytest.mark.vllm
def test_an_agent_may_ask_for_a_form_of_scripted_answers(
    config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "forms.py").write_text(AGENT_OF_FORMS)
    settings = [f"agent.function={tmp_path}/forms.py:solve", "environment.env_class=x"]
    assert cli.main(["try", config, *settings, "--answers", '{"a": 1}', '{"a": 2}']) == 0
    printed = capsys.readouterr().out
    assert 'answer: {"a": 1}' in printed
    assert "rewards: 0 1; ended by stop" in printed


REWARDS = """
def score(answer, row):
    return {"reward": float(answer == row["answer"]), "short": 1.0}

def broken(answer, row):
    return row["nosuch"]

def exact(completions, answer, **columns):
    return [float(c == a) for c, a in zip(completions, answer)]

def brief(completions, **columns):
    return [{"reward": 0.5, "words": len(c.split())} for c in completions]

def raises(completions, **columns):
    return completions[9]

def other(answer):
    return 1.0

def needs(completions, nosuch):
    return [1.0 for _ in completions]
"""


@pytest.fixture
def rewards(config: str) -> list[str]:
    Path("rewards.py").write_text(REWARDS)
    return ["try", config, "--answers", "red", "green"]


@pytest.mark.spec("try.rewards")
def test_a_reward_function_is_tried_with_each_answer(
    rewards: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([*rewards, "--reward", "rewards.py:score"]) == 0
    assert capsys.readouterr().out == (
        "sample 0\n"
        "environment: score\n"
        "prompt: [user] Colour 0?<|end|>\n"
        "  [assistant]\n"
        "turn 1\n"
        "  answer: red\n"
        "  reward: {'reward': 1.0, 'short': 1.0}\n"
        "  done: True\n"
        "rewards: 1; ended by stop\n"
        "metrics: {'short': 1.0}\n"
        "\n"
        "sample 1\n"
        "environment: score\n"
        "prompt: [user] Colour 0?<|end|>\n"
        "  [assistant]\n"
        "turn 1\n"
        "  answer: green\n"
        "  reward: {'reward': 0.0, 'short': 1.0}\n"
        "  done: True\n"
        "rewards: 0; ended by stop\n"
        "metrics: {'short': 1.0}\n"
    )


@pytest.mark.spec("try.rewards")
def test_reward_functions_are_tried_with_a_group_of_answers(
    rewards: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    functions = ["--reward-funcs", "rewards.py:exact", "rewards.py:brief"]
    assert cli.main([*rewards, *functions]) == 0
    first, second = capsys.readouterr().out.split("\n\n")
    assert "answer: red" in first and "rewards: 1.5; ended by stop" in first
    assert "answer: green" in second and "rewards: 0.5; ended by stop" in second
    for part in ("'reward_exact': 1.0", "'reward_brief': 0.5", "'reward_brief/words': 1.0"):
        assert part in first


@pytest.mark.spec("try.rewards")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--reward", "rewards.py:broken"], "step raised KeyError: 'nosuch'"),
        (["--reward-funcs", "rewards.py:raises"], "raised IndexError: list index out of range"),
    ],
)
def test_a_reward_that_raises_is_named_with_its_line(
    rewards: list[str],
    options: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert cli.main([*rewards, *options]) == 1
    assert message in capsys.readouterr().out
    assert 'rewards.py", line ' in caplog.text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--reward", "rewards.py:nosuch"], "--reward: 'rewards.py' has no 'nosuch'"),
        (["--reward", "nosuch.py:f"], "--reward: cannot import 'nosuch.py'"),
        (["--reward", "rewards.py:other"], "can be called as reward(answer, row)"),
        (["--reward-funcs", "rewards.py:needs"], "reward_funcs: needs: expected arguments named"),
        (
            ["--reward", "rewards.py:score", "--reward-funcs", "rewards.py:exact"],
            "expected one of env, reward, reward_funcs and agent, got several",
        ),
    ],
)
def test_a_reward_that_cannot_be_called_is_a_usage_error(
    rewards: list[str], options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([*rewards, *options]) == 2
    assert message in capsys.readouterr().err


def test_tools_that_only_the_plain_tokenizer_is_sure_to_write_are_said(
    config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    said = "--tokenizer shows what it writes"
    assert cli.main(["try", config, "--answers", "red"]) == 0
    assert said not in capsys.readouterr().out
    row = {"prompt": "Colour?", "answer": "red", "tools": [tool]}
    Path("rows.jsonl").write_text(json.dumps(row))
    assert cli.main(["try", config, "--answers", "red"]) == 0
    assert capsys.readouterr().out.count(said) == 1
