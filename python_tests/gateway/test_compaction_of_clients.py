"""Claude Code, Codex and opencode compact their context: its calls are named, its rows exact.

Their requests are scripted here in the form in which they come (docs/guide/long_agents.md). The
clients themselves, where they are installed, are slow tests. The policy is always scripted.
"""

import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from _families import FAMILIES, FOLDER, byte_tokenizer
from _gateway import MODEL, USER, Played, chat, played
from _tools import CALL, LOOK, TEMPLATE, CallParser
from fake_envs import says

from skyrl_fast.batch import batch_from_trajectories
from skyrl_fast.config import SamplingParams
from skyrl_fast.gateway.agents.command import CommandAgent
from skyrl_fast.rollout.contexts import context_numbers
from skyrl_fast.rollout.tool_calls import ToolCallParser
from skyrl_fast.train.metrics.calls import call_metrics

pytest.importorskip("openai")

SUMMARY = "The key is under the third stone by the well."
TAGGED = f"<analysis>What was it again?</analysis>\n<summary>\n{SUMMARY}\n</summary>"
REQUEST = "Sum up."
LOOKS = [f"I look at the {place}.{CALL}" for place in ("old wooden door", "window", "dark cellar")]
LAST = "I take the key and leave."


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def check(out: Played, kinds: Sequence[str], contexts: Sequence[int]) -> None:
    """Check the names of a trajectory's calls, and that its rows are what was sampled."""
    trajectory = out.only
    steps = trajectory.steps
    assert [step.kind for step in steps] == list(kinds)
    assert context_numbers(trajectory) == list(contexts)
    check_rows(out)
    metrics = call_metrics([trajectory])
    for kind in ("act", "summarise", "other"):
        assert metrics[f"generate/calls/{kind}"] == list(kinds).count(kind)
    assert metrics["generate/avg_num_contexts"] == max(contexts) + 1


def check_rows(out: Played) -> None:
    """Check that each call is one row, of the tokens that the engine got and sampled."""
    steps = out.only.steps
    given = sorted(list(call.prompt_token_ids) for call in out.engine.calls)
    assert sorted(list(step.prompt_token_ids) for step in steps) == given
    for step in steps:
        assert step.loss_mask == [1] * len(step.response_ids)
        assert step.rollout_logprobs == [-0.5] * len(step.response_ids)
    rows = batch_from_trajectories([out.only])
    assert rows.num_rows == len(steps)
    assert int(rows.loss_mask.sum()) == sum(len(step.response_ids) for step in steps)
    assert int(rows.is_last_step.sum()) == 1  # it counts once in its group


def scripted(agent: Any, tokenizer: Any, answers: Sequence[str]) -> Played:
    out = played(
        agent,
        tokenizer,
        answer=lambda call, n: says(tokenizer, answers[n]),
        chat_template=TEMPLATE,
        tool_parser=CallParser(),
        max_input_length=4_000,
        sampling_params=SamplingParams(max_generate_length=200),
    )
    assert out.only.failure is None
    sampled = sorted(tokenizer.decode(step.response_ids[:-1]) for step in out.only.steps)
    assert sampled == sorted(answers)
    return out


@pytest.mark.spec("compaction.agents")
def test_claude_codes_form(tiny_tokenizer: Any) -> None:
    """The request follows all but the last exchange, which is kept after the summary."""
    pytest.importorskip("anthropic")
    tool = {"name": "look", "input_schema": LOOK["function"]["parameters"]}

    async def agent(task: Any) -> float:
        async def ask(messages: list[Any]) -> list[Any]:
            """Return the answer, and the result of its tool call."""
            answer = await task.async_anthropic.messages.create(
                model=MODEL, max_tokens=200, messages=messages, tools=[tool]
            )
            said = {"role": "assistant", "content": answer.content}
            calls = [block.id for block in answer.content if block.type == "tool_use"]
            results = []
            for call in calls:
                results.append({"type": "tool_result", "tool_use_id": call, "content": "a stone"})
            return [said, {"role": "user", "content": results}]

        messages = [USER]
        for _ in range(2):
            messages += await ask(messages)
        last = await ask(messages)
        summary = (await ask([*messages, user(REQUEST)]))[0]["content"][0].text
        kept = summary.partition("<summary>\n")[2].removesuffix("\n</summary>")
        await ask([user(f"task, continued.\nSummary:\n{kept}\nGo on."), *last])
        return 1.0

    out = scripted(agent, tiny_tokenizer, [*LOOKS, TAGGED, LAST])
    check(out, ["act", "act", "act", "summarise", "act"], [0, 0, 0, 0, 1])
    assert [step.parent for step in out.only.steps] == [None, 0, 1, 1, None]
    assert out.only.steps[4].parent is None
    assert LOOKS[2] in tiny_tokenizer.decode(out.only.steps[4].prompt_token_ids)


@pytest.mark.spec("compaction.agents")
def test_codexs_form(tiny_tokenizer: Any) -> None:
    """The request offers no tools, so that it continues nothing; the summary follows the task."""
    function = LOOK["function"]
    tool = {"type": "function", "name": "look", "parameters": function["parameters"]}

    async def agent(task: Any) -> float:
        create = task.async_openai.responses.create
        items: list[Any] = [USER]
        for _ in range(2):
            answer = await create(model=MODEL, input=items, tools=[tool])
            items += [item.model_dump(exclude_none=True) for item in answer.output]
            call = answer.output[-1].call_id
            items.append({"type": "function_call_output", "call_id": call, "output": "a stone"})
        summary = (await create(model=MODEL, input=[*items, user(REQUEST)])).output_text
        again = [USER, user(f"Another model has begun. Its summary:\n{summary}")]
        await create(model=MODEL, input=again, tools=[tool])
        return 1.0

    out = scripted(agent, tiny_tokenizer, [*LOOKS[:2], TAGGED, LAST])
    check(out, ["act", "act", "summarise", "act"], [0, 0, 1, 2])


@pytest.mark.spec("compaction.agents")
@pytest.mark.parametrize("keeps", [False, True])
def test_opencodes_form(keeps: bool, tiny_tokenizer: Any) -> None:
    """A title; a summary of the history as a text, which comes back as an answer."""
    title = "The old key in the garden"

    async def agent(task: Any) -> float:
        async def ask(messages: list[Any], **more: Any) -> list[Any]:
            """Return the answer, and the result of its tool call."""
            answer = (await chat(task, messages, **more)).choices[0].message
            results = []
            for call in answer.tool_calls or []:
                results.append({"role": "tool", "tool_call_id": call.id, "content": "a stone"})
            return [answer.model_dump(exclude_none=True), *results]

        await ask([{"role": "system", "content": "Name the conversation."}, USER])
        messages: list[Any] = [USER]
        for _ in range(2):
            messages += await ask(messages, tools=[LOOK])
        last = await ask(messages, tools=[LOOK])
        history = messages if keeps else [*messages, *last]
        text = "\n".join(f"[{m['role']}] {m['content']}" for m in history)
        said = await ask([{"role": "system", "content": "You sum up."}, user(f"{text}\n{REQUEST}")])
        kept = last if keeps else []
        again = [user("What did we do so far?"), *said, *kept, user("Go on.")]
        await ask(again, tools=[LOOK])
        return 1.0

    out = scripted(agent, tiny_tokenizer, [title, *LOOKS, SUMMARY, LAST])
    kinds = ["other", "act", "act", "act", "summarise", "act"]
    check(out, kinds, [0, 1, 1, 1, 2, 3])
    # The kept answers have the tokens that were sampled.
    last = list(out.only.steps[5].prompt_token_ids)
    text = tiny_tokenizer.decode(last)
    assert SUMMARY in text
    assert (LOOKS[2] in text) == keeps


# The clients themselves. Their policy looks at a long listing until its context is a summary.

TASK = "Write the word hello to the file out.txt."
VERIFIER = [sys.executable, "-c", "assert open('out.txt').read() == 'hello\\n'"]
LONG = "for i in $(seq 300); do echo this is line $i of a listing that is of no use to anyone; done"
WRITE = "echo hello > out.txt"
THRESHOLD = 60_000  # tokens; bytes here
WINDOW = 100_000
# Words of what the clients ask for a summary with, and of opencode's request for a title.
ASKS = ("detailed summary of the conversation", "HANDOFF SUMMARY", "CONTEXT SUMMARIZATION AGENT")
TITLES = "You are a title generator"


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return byte_tokenizer((FOLDER / "qwen3.jinja").read_text(), **FAMILIES["qwen3"])


def called(prompt: str, command: str) -> str | None:
    """Return a call of the shell tool that a prompt offers; None: it offers none."""
    tools = prompt.partition("<tools>\n")[2].partition("\n</tools>")[0]
    forms = {
        "Bash": {"command": command, "description": "run"},
        "bash": {"command": command, "description": "run"},
        "exec_command": {"cmd": command, "max_output_tokens": WINDOW},
    }
    for name, arguments in forms.items():
        if f'"name": "{name}"' in tools:
            body = json.dumps({"name": name, "arguments": arguments})
            return f"<tool_call>\n{body}\n</tool_call>"
    return None


def is_asked_for_summary(prompt: str) -> bool:
    system, _, rest = prompt.partition("<|im_start|>user")
    last = rest.rpartition("<|im_start|>user")[2]
    either = (system[:1_000] + (last or rest)).lower()
    return any(words.lower() in either for words in ASKS)


def run_client(command: Sequence[str], tokenizer: Any, home: Path) -> Played:
    """Let a client work on the task until it is done."""

    def answer(call: Any, n: int) -> Any:
        prompt = tokenizer.decode(list(call.prompt_token_ids))
        write = called(prompt, WRITE)
        if TITLES in prompt:
            text = "A greeting in a new file"
        elif is_asked_for_summary(prompt):
            text = TAGGED
        elif write is None or WRITE in prompt:
            text = LAST
        elif SUMMARY in prompt:
            text = write
        elif TASK not in prompt and "<tool_response>\n" in prompt:
            text = "I have looked at all of the listing."
        else:
            text = f"I look for the time number {n}.\n{called(prompt, LONG)}"
        return says(tokenizer, text)

    agent = CommandAgent(["env", f"HOME={home}", *command], verifier=VERIFIER)
    out = played(
        agent,
        tokenizer,
        answer=answer,
        tool_parser=ToolCallParser("hermes", tokenizer),
        max_input_length=400_000,
        max_retries=0,
        sampling_params=SamplingParams(max_generate_length=4_096),
    )
    trajectory = out.only
    assert trajectory.failure is None
    assert trajectory.steps[-1].reward == 1.0
    check_rows(out)
    for step in trajectory.steps:
        assert (step.kind == "summarise") == (step.text == TAGGED)
        assert (step.kind == "other") == step.text.startswith("A greeting")
    assert [step.kind for step in trajectory.steps].count("summarise") == 1
    return out


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_claude_code(tokenizer: Any, tmp_path: Path) -> None:
    program = shutil.which("claude") or pytest.skip("npm install -g @anthropic-ai/claude-code")
    variables = [
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC=1",
        "DISABLE_AUTOUPDATER=1",
        "IS_SANDBOX=1",
        f"CLAUDE_CODE_AUTO_COMPACT_WINDOW={WINDOW}",
        f"CLAUDE_AUTOCOMPACT_PCT_OVERRIDE={100 * THRESHOLD // WINDOW}",
    ]
    flags = ["--tools", "Bash", "--dangerously-skip-permissions"]
    command = [*variables, program, "-p", TASK, "--model", "policy", *flags]
    out = run_client(command, tokenizer, tmp_path)
    assert max(context_numbers(out.only)) == 1


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_claude_codes_slash_command(tokenizer: Any, tmp_path: Path) -> None:
    program = shutil.which("claude") or pytest.skip("npm install -g @anthropic-ai/claude-code")
    flags = "--model policy --tools Bash --dangerously-skip-permissions"
    run = f"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC=1 IS_SANDBOX=1 {program} {flags} -p"
    script = f"{run} 'Look once.' && {run} -c /compact && {run} -c '{TASK}'"
    out = run_client(["sh", "-c", script], tokenizer, tmp_path)
    assert max(context_numbers(out.only)) == 1


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_codex(tokenizer: Any, tmp_path: Path) -> None:
    program = shutil.which("codex") or pytest.skip("npm install -g @openai/codex")
    settings = {
        "model_provider": "g",
        "model_providers.g.name": "g",
        "model_providers.g.base_url": '"$OPENAI_BASE_URL"',
        "model_providers.g.env_key": "OPENAI_API_KEY",
        "model_providers.g.wire_api": "responses",
        "model_context_window": WINDOW,
        "model_auto_compact_token_limit": THRESHOLD,
        "tool_output_token_limit": WINDOW,
    }
    options = " ".join(f"-c {name}={value}" for name, value in settings.items())
    flags = "--skip-git-repo-check --dangerously-bypass-approvals-and-sandbox -m policy"
    script = f"exec {program} exec {flags} {options} '{TASK}'"
    out = run_client(["sh", "-c", script], tokenizer, tmp_path)
    assert max(context_numbers(out.only)) == 2  # the summary's request is one


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("compaction", [{"tail_turns": 0}, {"preserve_recent_tokens": 6_000}])
def test_opencode(compaction: dict[str, int], tokenizer: Any, tmp_path: Path) -> None:
    program = shutil.which("opencode") or pytest.skip("npm install -g opencode-ai")
    output = 4_000
    model = {"name": "policy", "limit": {"context": THRESHOLD + output, "output": output}}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": "{env:OPENAI_BASE_URL}", "apiKey": "{env:OPENAI_API_KEY}"},
        "models": {"policy": model},
    }
    config = {"provider": {"g": provider}, "compaction": compaction, "autoupdate": False}
    variables = [
        f"OPENCODE_CONFIG_CONTENT={json.dumps(config)}",
        "OPENCODE_DISABLE_AUTOUPDATE=1",
        "OPENCODE_DISABLE_MODELS_FETCH=1",
    ]
    out = run_client([*variables, program, "run", "--model", "g/policy", TASK], tokenizer, tmp_path)
    assert max(context_numbers(out.only)) == 3  # the title and the summary are two
