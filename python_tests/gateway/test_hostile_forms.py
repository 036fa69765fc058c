"""Forms of answers that are hard to compile are refused by name, and quickly."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from _gateway import USER, chat, played
from _hostile_forms import FORMS, Form

from skyrl_fast.gateway.form_limits import FormError, check_form

httpx = pytest.importorskip("httpx")

CHECK_SECONDS = 1.0
ANSWER_SECONDS = 20.0
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


@pytest.mark.spec("gateway.form-limits")
def test_each_form_is_checked_quickly() -> None:
    seconds, refused = {}, 0
    for name, form in FORMS.items():
        began = time.thread_time()
        refused += refused_here(form)
        seconds[name] = time.thread_time() - began
    assert len(FORMS) > 400 and refused > 100
    assert max(seconds.values()) < CHECK_SECONDS, max(seconds, key=seconds.__getitem__)


@pytest.mark.spec("gateway.form-limits")
def test_each_door_refuses_forms_beyond_the_limits_by_name(tiny_tokenizer: Any) -> None:
    forms = [form for form in list(FORMS.values())[::8] if len(str(form)) < 1_000_000]
    ends = []

    async def agent(task: Any) -> float:
        async with client_of(task) as client:
            for form in forms:
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
    assert len(ends) > 80
