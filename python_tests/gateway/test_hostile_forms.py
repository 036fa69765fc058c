"""Forms of answers that are hard to compile are refused by name, and quickly."""

import asyncio
import json
import re
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from _gateway import USER, chat, played
from _gateway import uncompiled_forms as uncompiled_forms  # a fixture
from _hostile_forms import FORMS, Form
from fake_envs import FakePrompt

from skyrl_fast.config import SamplingParams
from skyrl_fast.gateway.form_compiler import FormCompiler
from skyrl_fast.gateway.form_limits import FormError, check_form
from skyrl_fast.rollout.workers.processes import ProcessWorkers

pytestmark = pytest.mark.spec("gateway.form-limits")

httpx = pytest.importorskip("httpx")

CHECK_SECONDS = 1.0
STALL_SECONDS = 1.0
ANSWER_SECONDS = 60.0
TOKENS = 24


def doors(form: Form) -> dict[str, Any]:
    """Return the bodies, by path, in which each dialect asks for a form."""
    rest = {"model": "policy", "messages": [USER]}
    bodies = {"/chat/completions": {**rest, "max_tokens": TOKENS, "structured_outputs": form}}
    if "json" in form:
        schema = {"type": "json_schema", "schema": form["json"], "name": "a"}
        config = {"format": {"type": "json_schema", "schema": form["json"]}}
        bodies["/responses"] = {
            "model": "policy", "input": "a", "max_output_tokens": TOKENS, "text": {"format": schema}
        }  # fmt: skip
        bodies["/messages"] = {**rest, "max_tokens": TOKENS, "output_config": config}
    return bodies


def refused_here(form: Form) -> bool:
    try:
        check_form(form)
    except FormError:
        return True
    return False


def _tokenizer() -> Any:
    """Return a tokenizer of 2,000 tokens: with single bytes, everything compiles quickly."""
    from bench._tokenizer import byte_level_tokenizer

    return byte_level_tokenizer(texts=[Path("LICENSE").read_text()], vocab_size=2_000)


async def post(client: Any, path: str, body: Any) -> str:
    """Return the status of an answer, which names the parameter if it is an error."""
    try:
        answer = await client.post(path, content=json.dumps(body), timeout=ANSWER_SECONDS)
    except httpx.TimeoutException:
        return "late"
    if answer.status_code != 200:
        error = answer.json()["error"]["message"]
        return f"{answer.status_code} {error}"
    return "200"


def client_of(task: Any) -> Any:
    headers = {"authorization": f"Bearer {task.api_key}", "x-api-key": task.api_key}
    return httpx.AsyncClient(
        base_url=task.base_url, headers={**headers, "content-type": "application/json"}
    )


def test_each_form_is_checked_quickly() -> None:
    seconds = {}
    refused = set()
    for name, form in FORMS.items():
        began = time.thread_time()
        if refused_here(form):
            refused.add(name)
        seconds[name] = time.thread_time() - began
    assert {"json: deep", "choice: many", "regex: repeated without end"} < refused < FORMS.keys()
    assert max(seconds.values()) < CHECK_SECONDS, max(seconds, key=seconds.__getitem__)


@pytest.mark.usefixtures("uncompiled_forms")
def test_each_door_refuses_forms_beyond_the_limits_by_name(tiny_tokenizer: Any) -> None:
    ends = []

    async def agent(task: Any) -> float:
        async with client_of(task) as client:
            for form in FORMS.values():
                for path, body in doors(form).items():
                    ends.append((form, path, await post(client, path, body)))
        await chat(task, [USER])
        return 1.0

    out = played(agent, tiny_tokenizer, max_retries=0, max_turns=1_000)
    assert out.only.failure is None
    for form, path, end in ends:
        if refused_here(form):
            assert end.startswith("400 ") and "expected" in end, (path, end)
        else:
            assert end == "200" or end.startswith("400 "), (path, end)
    assert len(ends) > len(FORMS) > 60


def test_forms_that_the_compiler_refuses_or_that_slow_every_token_are_refused() -> None:
    forms = [
        {"regex": "(?i:abc)"},
        {"grammar": "root ::= " + '("a" | "b")? ' * 450},
        {"json": {"$ref": "#"}},
        {"choice": ["a\0b", "c"]},
        {"grammar": 'start: "a"'},
        {"regex": "a+"},
        {"choice": ['"', "\\", "c"]},
    ]
    answers = []

    async def agent(task: Any) -> float:
        async with client_of(task) as client:
            for form in forms:
                path, body = next(iter(doors(form).items()))
                answers.append(await post(client, path, body))
        return 1.0

    played(agent, _tokenizer(), max_retries=0)
    # Which check a form fails differs between versions of the compiler.
    refused = zip(answers, forms[:5], strict=False)
    for answer, form in refused:
        assert re.match(f"400 .*form of an answer: {next(iter(form))}: expected a form ", answer)
    assert answers[5:] == ["200", "200"]


def test_a_form_is_refused_where_no_process_can_be_started(
    tiny_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("xgrammar")

    async def acquire(_: Any) -> Any:
        raise OSError("Cannot allocate memory")

    monkeypatch.setattr(ProcessWorkers, "acquire", acquire)
    with pytest.raises(FormError, match="regex: no process can be started: Cannot allocate"):
        asyncio.run(FormCompiler(tiny_tokenizer).check({"regex": "a+"}))


@pytest.mark.slow
def test_a_compilation_without_end_is_killed_and_the_next_form_is_compiled() -> None:
    async def check() -> None:
        compiler = FormCompiler(_tokenizer())
        tag = {"type": "grammar", "grammar": "root ::= " + '("a" | "b")? ' * 1_200}
        form = {"structural_tag": json.dumps({"type": "structural_tag", "format": tag})}
        for _ in range(2):  # the second time at once
            with pytest.raises(FormError, match=r"compiles within 10 s .* killed by SIGXCPU"):
                await compiler.check(form)
        await compiler.check({"regex": "a+"})

    began = time.process_time()
    asyncio.run(check())
    assert time.process_time() - began < CHECK_SECONDS  # of this process


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.alone
@pytest.mark.timeout(1800)
def test_other_sessions_go_on_while_vllm_serves_each_form(tmp_path: Path) -> None:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from skyrl_fast.rollout.engine.vllm_engine import VllmEngine
    from skyrl_fast.rollout.engine.vllm_start import VllmSetup

    tokenizer = _tokenizer()
    tokenizer.save_pretrained(tmp_path)
    torch.manual_seed(0)
    config = Qwen2Config(
        **{"vocab_size": len(tokenizer), "hidden_size": 64, "intermediate_size": 128},
        **{"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1},
        **{"max_position_embeddings": 8_192, "eos_token_id": tokenizer.eos_token_id},
    )
    Qwen2ForCausalLM(config).float().save_pretrained(tmp_path)
    sent = {name: form for name, form in FORMS.items() if not refused_here(form)}
    ends: dict[str, str] = {}
    stalls: Counter[str] = Counter()
    ended = asyncio.Event()
    serving = "start"

    async def asks_for_forms(task: Any) -> float:
        nonlocal serving
        async with client_of(task) as client:
            await post(client, "/chat/completions", doors({"regex": "a+"})["/chat/completions"])
            for serving, form in sent.items():
                path, body = next(iter(doors(form).items()))
                ends[serving] = await post(client, path, body)
        ended.set()
        return 1.0

    async def goes_on(task: Any) -> float:
        async with client_of(task) as client:
            while not ended.is_set():
                during, began = serving, time.monotonic()
                body = {"model": "policy", "messages": [USER], "max_tokens": 2}
                assert await post(client, "/chat/completions", body) == "200"
                stalls[during] = max(stalls[during], time.monotonic() - began)
        return 1.0

    async def agent(task: Any) -> float:
        return await (goes_on if task.row["other"] else asks_for_forms)(task)

    engine = VllmEngine(VllmSetup(str(tmp_path), max_model_len=8_192))
    prompts = [FakePrompt(str(n), env_extras={"other": bool(n)}) for n in range(2)]
    sampling = SamplingParams(max_generate_length=TOKENS)
    out = played(
        agent, tokenizer, engine=engine, prompts=prompts, sampling_params=sampling, max_retries=0,
        max_turns=10**6, max_input_length=8_000,
    )  # fmt: skip
    del stalls["start"]  # vLLM's compilers are made at the first form
    kinds = Counter(end.partition(" ")[0] for end in ends.values())
    print(f"{len(FORMS)} forms, {len(ends)} to vLLM: {dict(kinds)}")
    print("longest stalls:", stalls.most_common(8))
    print("odd:", {n: end[:200] for n, end in ends.items() if end[:3] not in ("200", "400")})
    assert [t.failure for t in out.trajectories] == [None, None]
    assert set(kinds) <= {"200", "400"}
    assert max(stalls.values()) <= STALL_SECONDS
