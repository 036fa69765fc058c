"""A client's mistake is answered in its dialect with 400, and fails no trajectory."""

from typing import Any

import httpx
import pytest
from _gateway import played
from fake_envs import says

from skyrl_fast.rollout.engine.protocol import RefusedRequestError

ASKED = [{"role": "user", "content": "a"}]


def nested(depth: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(depth):
        value = {"a": value}
    return value


MISTAKES: dict[str, tuple[str, dict[str, Any]]] = {
    "prompt ids": ("/completions", {"prompt": [99_999_999, 5]}),
    "stop_token_ids": ("/chat/completions", {"messages": ASKED, "stop_token_ids": [-1]}),
    **{
        f"template argument {name}": (
            "/chat/completions",
            {"messages": ASKED, "chat_template_kwargs": {name: value}},
        )
        for name, value in {"messages": [], "self": 1, "tools": [], "answer_next": False}.items()
    },
    "nesting": ("/chat/completions", {"messages": ASKED, "chat_template_kwargs": nested(600)}),
}


@pytest.mark.spec("gateway.errors")
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_400_and_no_failure(mistake: str, tiny_tokenizer: Any) -> None:
    def answer(call: Any, number: int) -> Any:
        ids = [*call.prompt_token_ids, *call.sampling.additional_kwargs.get("stop_token_ids", [])]
        if not all(0 <= token < len(tiny_tokenizer) for token in ids):
            return RefusedRequestError("out of the vocabulary")
        return says(tiny_tokenizer, "ok")

    seen = []

    async def agent(task: Any) -> float:
        headers = {"authorization": f"Bearer {task.api_key}"}
        options: dict[str, Any] = {"headers": headers, "timeout": 60.0}  # a busy machine
        async with httpx.AsyncClient(base_url=task.base_url, **options) as client:
            body = {"model": task.model, "messages": ASKED}
            await client.post("/chat/completions", json=body)
            path, wrong = MISTAKES[mistake]
            response = await client.post(path, json={"model": task.model, **wrong})
            seen.append((response.status_code, "message" in response.json()["error"]))
        return 1.0

    trajectory = played(agent, tiny_tokenizer, answer=answer, max_retries=2).only
    assert seen == [(400, True)]  # one attempt: it is not played again
    assert trajectory.failure is None and len(trajectory.steps) == 1
