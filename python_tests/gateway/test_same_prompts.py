"""One conversation has one prompt, from whichever source it comes."""

import json
from pathlib import Path
from typing import Any

import pytest
from fake_envs import ScriptedEngine, loop_config, run, says

pytest.importorskip("openai")

from helpers._gateway import chat, gateways, played
from helpers._thorough import THOROUGH
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from skyrl_fast.gateway.transcript import Transcript
from skyrl_fast.rollout.chat_messages import normalize_messages, template_kwargs_of
from skyrl_fast.rollout.env.protocol import Env, EnvStep
from skyrl_fast.train.data.demonstrations import build_demonstration, chat_of
from skyrl_fast.train.data.prompts import Prompt, prompts_from
from skyrl_fast.trajectory_store.recorded import rows_of_calls

# Writes all that it gets: keys in their order, nulls, and types.
TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}{{ style }}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% if m.reasoning_content is defined %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.name | tojson if m.name is defined }}"
    "{{ m.tool_call_id | tojson if m.tool_call_id is defined }}"
    "{% for c in m.tool_calls or [] %}<call>{{ c | tojson }}</call>{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
OK = {"role": "assistant", "content": "ok"}
texts = st.text(alphabet='ab é\n\u2028\u0085\U0001f600"\\{}<', max_size=6)
# A column of Arrow has one type for each key, and one order of keys: that of this row, which has
# all of them. So other rows have nulls for the keys that they lack.
ARGUMENTS = {
    "flag": st.booleans(),
    "list": st.lists(st.integers(0, 9)),
    "number": st.integers(0, 9),
}
ARGUMENTS |= {"path": st.fixed_dictionaries({}, optional={"deep": texts}), "text": texts}
ALL = {"flag": True, "list": [1], "number": 1, "path": {"deep": "x"}, "text": "x"}


def tool(properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": "f", "parameters": parameters}}


@st.composite
def rows(draw: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a row, and another one that has all keys."""
    in_parts, as_text = draw(st.booleans()), draw(st.booleans())

    def content(text: str) -> Any:
        if not in_parts:
            return text
        cut = draw(st.integers(0, len(text)))
        return [{"type": "text", "text": part} for part in (text[:cut], text[cut:])]

    def message(role: str, **more: Any) -> dict[str, Any]:
        keys = draw(st.sets(st.sampled_from(["name", "reasoning", "tool_calls"])))
        nulls = dict.fromkeys(keys - more.keys())
        return {"role": role, "content": content(draw(texts) + "."), **nulls, **more}

    def arguments(values: Any) -> Any:
        if not as_text:
            return {name: values[name] for name in ALL if name in values}
        null = {"null": None} if draw(st.booleans()) else {}  # a mapping of Arrow would not keep it
        return json.dumps({**values, **null}, ensure_ascii=draw(st.booleans()))

    def call(name: str, values: Any) -> dict[str, Any]:
        function = {"name": "f", "arguments": arguments(values)}
        return {"id": name, "type": "function", "function": function}

    def round_of_calls(number: int) -> list[dict[str, Any]]:
        ids = [f"c{number}{n}" for n in range(draw(st.integers(1, 2)))]
        values = st.fixed_dictionaries({}, optional=ARGUMENTS)
        more = {"reasoning": draw(texts) + "t"} if draw(st.booleans()) else {}
        calls = [call(name, draw(values)) for name in ids]
        answer = message("assistant", tool_calls=calls, **more)
        answer["content"] = draw(st.sampled_from([None, answer["content"]]))
        return [answer, *(message("tool", tool_call_id=name, name="f") for name in ids)]

    first = [message(draw(st.sampled_from(["system", "developer"])))] if draw(st.booleans()) else []
    ok = [{"type": "text", "text": "ok"}] if in_parts else "ok"
    messages = [*first, message("user"), {**OK, "content": ok}]
    messages.append(message("user"))
    for number in range(draw(st.integers(0, 2))):
        messages += round_of_calls(number)
    names = [name for name in ALL if draw(st.booleans())]
    properties = {name: {"description": draw(texts), "type": "x"} for name in names}
    kwargs = {"style": draw(texts)} if draw(st.booleans()) else {}
    row = {"prompt": messages, "tools": [tool(properties)], "chat_template_kwargs": kwargs}
    full = {"role": "assistant", "content": content("a"), "name": "f", "reasoning": "t"}
    full |= {"tool_calls": [call("c", ALL)], "tool_call_id": "c"}
    everything = {name: {"description": "d", "type": "x"} for name in ALL}
    style = {"style": "s", "other": 1}
    return row, {"prompt": [full], "tools": [tool(everything)], "chat_template_kwargs": style}


class Halves(Env):
    """Give the beginning of the prompt first, and the rest after the answer `ok`."""

    def __init__(self, row: dict[str, Any]) -> None:
        pass

    def init(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        place = [m["role"] for m in messages].index("assistant")
        self.rest = messages[place + 1 :]
        return messages[:place]

    def step(self, action: str) -> EnvStep:
        rest, self.rest = self.rest, []
        return EnvStep(0.0, done=not rest, observations=rest)


def every_source(row: dict[str, Any], full: dict[str, Any], folder: Path) -> dict[str, Prompt]:
    datasets = pytest.importorskip("datasets")  # its import takes 2 processor seconds
    import pandas
    import pyarrow.parquet

    table = pyarrow.Table.from_pylist([full, row])
    pyarrow.parquet.write_table(table, folder / "rows.parquet")
    (folder / "rows.jsonl").write_text(f"{json.dumps(full)}\n{json.dumps(row)}\n")
    sources: dict[str, Any] = {
        "rows": [full, row],
        "Dataset": datasets.Dataset.from_list([full, row]),
        "DataFrame": pandas.DataFrame([full, row]),
        "Table": table,
        "parquet": folder / "rows.parquet",
        "jsonl": str(folder / "rows.jsonl"),
    }
    texts = {name: json.dumps(row[name]) for name in ("tools", "chat_template_kwargs")}
    sources["JSON text"] = [full, {**row, **texts}]
    return {
        name: prompts_from(source, default_env_class="x", prefix=name)[1]
        for name, source in sources.items()
    }


def with_text_arguments(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages with the arguments of calls as JSON text, the only form that clients send."""
    messages = json.loads(json.dumps(messages))
    for function in (c["function"] for m in messages for c in m.get("tool_calls") or []):
        if not isinstance(function["arguments"], str):
            function["arguments"] = json.dumps(function["arguments"])
    return messages


@pytest.mark.spec("sft.template-arguments", "rollout.arrow", "gateway.export-sft")
@settings(
    max_examples=100 if THOROUGH else 4,  # 0.2 s each
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(both=rows())
def test_a_conversation_has_one_prompt_by_every_source(
    both: tuple[dict[str, Any], dict[str, Any]], tmp_path: Path, tiny_tokenizer: Any
) -> None:
    row, full = both
    template = {"max_input_length": 4096, "chat_template": TEMPLATE}
    transcript = Transcript()

    def answer(call: Any, number: int) -> Any:
        return says(tiny_tokenizer, "ok")

    async def agent(task: Any) -> float:
        gateways[-1].on_answer = lambda session, call, answer: transcript.add(call, answer)
        kwargs = {"chat_template_kwargs": row["chat_template_kwargs"]}
        messages = with_text_arguments(row["prompt"])
        await chat(task, messages, tools=row["tools"], extra_body=kwargs)
        return 1.0

    options = {"answer": answer, "chat_template": TEMPLATE, "max_input_length": 4096}
    out = played(agent, tiny_tokenizer, **options)
    wanted = tiny_tokenizer.decode(list(out.only.steps[0].prompt_token_ids))
    plain = normalize_messages(row["prompt"])
    kwargs = template_kwargs_of(row)
    assert wanted == tiny_tokenizer.apply_chat_template(
        plain, chat_template=TEMPLATE, tokenize=False, add_generation_prompt=True, **kwargs
    )
    sources = every_source(row, full, tmp_path)
    config = loop_config(context="retemplate", max_turns=2, **template)
    engine = ScriptedEngine(answer)
    trajectories = run(tiny_tokenizer, [*sources.values()], config, engine, make_env=Halves)
    prompts = dict(zip(sources, trajectories, strict=True))
    for name, trajectory in prompts.items():
        assert trajectory.failure is None
        got = tiny_tokenizer.decode(list(trajectory.steps[1].prompt_token_ids))
        assert got == wanted, name
    # As demonstrations: the export of what the gateway recorded, and the same rows.
    (exported,) = rows_of_calls(json.loads(json.dumps(transcript.records)))
    rows = [exported]
    rows += [{"messages": [*p.messages, OK], **p.env_extras} for p in sources.values()]
    for demonstration in rows:
        steps = build_demonstration(
            chat_of(demonstration, "row"),
            tiny_tokenizer,
            loop_config(**template),
            "row",
            template_kwargs=template_kwargs_of(demonstration),
        )
        assert tiny_tokenizer.decode(list(steps[-1].prompt_token_ids)) == wanted
