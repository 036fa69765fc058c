"""The gateway alone: sessions opened and ended over HTTP, stored, and exported."""

import asyncio
import json
import re
import socket
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_envs import Call, ScriptedEngine, says

pytest.importorskip("httpx")
pytest.importorskip("openai")
pytest.importorskip("omegaconf")
pytest.importorskip("starlette")

import httpx
import openai

from skyrl_fast import cli
from skyrl_fast.adapters.generator_output import generator_output_from_trajectories
from skyrl_fast.batch import StepBatch
from skyrl_fast.batch.generator_output import validate_generator_output
from skyrl_fast.commands.gateway import KEY_FILE, serving
from skyrl_fast.config.loading import load_config
from skyrl_fast.gateway import recording
from skyrl_fast.gateway.sessions import Sessions
from skyrl_fast.rollout.engine.protocol import Generation
from skyrl_fast.system.network_interface import listen_at
from skyrl_fast.train.data.demonstrations import chat_of
from skyrl_fast.trajectory_store import read_index, read_trajectories
from skyrl_fast.trajectory_store.recorded import read_recorded, rows_of_calls, sft_rows
from skyrl_fast.trajectory_store.writer import StoreError

USER = {"role": "user", "content": "task"}
SETTINGS = [
    "trainer.policy.model.path=m",
    "generator.max_turns=50",
    "generator.max_input_length=512",
    "generator.sampling_params.max_generate_length=64",
]


def said(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


class Client:
    """What a program does with a gateway: plain HTTP, and OpenAI's client with a session's key."""

    def __init__(self, sessions: Sessions, run: Path) -> None:
        self.sessions = sessions
        self.http = httpx.AsyncClient(base_url=sessions.url, trust_env=False)
        self.key = (run / KEY_FILE).read_text().strip()

    async def post(self, path: str, key: str | None, body: Any = None) -> Any:
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        return await self.http.post(path, json=body, headers=headers)

    async def open(self, **fields: Any) -> Any:
        answer = await self.post("/sessions", self.key, fields)
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def chat(self, opened: Any, messages: list[Any], **options: Any) -> str:
        client = openai.AsyncOpenAI(
            base_url=opened["base_url"],
            api_key=opened["api_key"],
            http_client=openai.DefaultAsyncHttpxClient(trust_env=False),
        )
        async with client:
            answer = await client.chat.completions.create(
                model=opened["model"], messages=messages, **options
            )
            if options.get("stream"):
                return "".join([e.choices[0].delta.content or "" async for e in answer])
        return answer.choices[0].message.content

    async def end(self, opened: Any, **outcome: Any) -> Any:
        answer = await self.post("/sessions/end", opened["api_key"], outcome or None)
        assert answer.status_code == 200, answer.text
        return answer.json()


def served(
    run: Path,
    tokenizer: Any,
    use: Callable[[Client], Awaitable[Any]],
    *settings: str,
    answer: Callable[[Call, int], Generation] | None = None,
) -> Any:
    """Serve a scripted engine that answers a0, a1, ..., and return what a coroutine returns."""

    async def go() -> Any:
        engine = ScriptedEngine(answer or (lambda call, n: says(tokenizer, f"a{n}")))
        config = load_config(None, [*SETTINGS, *settings], has_prompts=True)
        async with serving(config, engine, tokenizer, run=run) as sessions:
            return await use(Client(sessions, run))

    return asyncio.run(go())


async def conversation(client: Client) -> Any:
    """Two calls that grow, a fork, a call of `n` answers; reward 2 and one for a call."""
    opened = await client.open(uid="t", data_source="tests")
    history = [USER, said(await client.chat(opened, [USER])), user("more")]
    await client.chat(opened, history, stream=True)
    await client.chat(opened, [USER, said("a0"), user("other")])
    return await client.end(opened, reward=2.0, score=5)


def test_bodies_of_answers_do_not_wait_for_acknowledgements() -> None:
    """A kept connection's answers, headers and body in two writes, would each take 40 ms more."""
    with listen_at("127.0.0.1") as listening, socket.create_connection(listening.getsockname()):
        connection, _ = listening.accept()
        with connection:
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


@pytest.mark.spec("gateway.address")
@pytest.mark.parametrize(
    ("host", "url"), [("::1", r"http://\[::1\]:\d+/v1"), ("localhost", r"http://localhost:\d+/v1")]
)
def test_gateway_listens_at_addresses_of_both_families(
    host: str, url: str, tmp_path: Path, tiny_tokenizer: Any
) -> None:
    if host == "::1":
        try:
            listen_at(host).close()
        except OSError:
            pytest.skip("this machine has no IPv6")

    async def use(client: Client) -> None:
        opened = await client.open(uid="t")
        assert re.fullmatch(url, opened["base_url"])
        assert await client.chat(opened, [USER]) == "a0"

    served(tmp_path, tiny_tokenizer, use, f"agent.host={host}")


@pytest.mark.spec("gateway.sessions")
def test_a_session_is_stored_when_it_ends(tmp_path: Path, tiny_tokenizer: Any) -> None:
    async def use(client: Client) -> None:
        ended = await conversation(client)
        assert (ended["uid"], ended["repetition_id"], ended["calls"]) == ("t", 0, 3)
        assert ended["stored"]
        (entry,) = read_index(tmp_path)  # on the disk before the answer
        assert (entry.uid, entry.reward, entry.data_source) == ("t", 2.0, "tests")
        empty = await client.open(uid="t")
        assert empty["repetition_id"] == 1
        assert not (await client.end(empty))["stored"]
        late = await client.post("/chat/completions", empty["api_key"], {})
        assert late.status_code == 403

    served(tmp_path, tiny_tokenizer, use)
    (stored,) = read_trajectories(tmp_path)
    assert [step.turn["response"] for step in stored.steps] == [f"a{n}<|im_end|>" for n in range(3)]
    assert stored.env_metrics["score"] == 5
    assert stored.env_metrics["continued_prompts"] == 2


@pytest.mark.spec("gateway.sessions")
def test_a_recording_is_continued(tmp_path: Path, tiny_tokenizer: Any) -> None:
    served(tmp_path, tiny_tokenizer, conversation)
    served(tmp_path, tiny_tokenizer, conversation)
    assert [(e.uid, e.repetition_id) for e in read_index(tmp_path)] == [("t", 0), ("t", 1)]
    first, second = read_recorded(tmp_path)
    assert first.steps[0].prompt_token_ids == second.steps[0].prompt_token_ids

    async def use(client: Client) -> None:
        with pytest.raises(ValueError, match="another process writes"):
            recording.Recording(tmp_path, tiny_tokenizer)

    served(tmp_path, tiny_tokenizer, use)
    (tmp_path / "trajectories" / "step_000001.jsonl").touch()
    with pytest.raises(ValueError, match="holds a training run"):
        served(tmp_path, tiny_tokenizer, use)


def test_sessions_without_a_group_get_one_of_their_own(tmp_path: Path, tiny_tokenizer: Any) -> None:
    """Also after a restart, which knows only the stored ones, and where others have such names."""

    async def use(client: Client) -> list[str]:
        opened = [await client.open(uid="session-2"), *[await client.open() for _ in range(3)]]
        await client.chat(opened[-1], [USER])
        await client.end(opened[-1], reward=1.0)
        return [one["uid"] for one in opened]

    first, again = (served(tmp_path, tiny_tokenizer, use) for _ in range(2))
    assert first == ["session-2", "session-1", "session-3", "session-4"]
    assert again == ["session-2", "session-1", "session-3", "session-5"]


@pytest.mark.spec("gateway.session-keys")
def test_sessions_are_opened_with_the_gateways_key(tmp_path: Path, tiny_tokenizer: Any) -> None:
    async def use(client: Client) -> None:
        opened = await client.open()
        assert opened["uid"] == "session-1"
        for key in (None, "sk-wrong", opened["api_key"]):
            answer = await client.post("/sessions", key)
            assert answer.status_code == 401
            assert answer.json()["error"]["code"] == "invalid_api_key"
        for path in ("/sessions/end", "/chat/completions"):
            assert (await client.post(path, client.key, {})).status_code == 401
        page = await client.http.post(
            "/sessions", headers={"authorization": f"Bearer {client.key}", "origin": "http://a"}
        )
        assert page.status_code == 403
        bad = await client.post("/sessions/end", opened["api_key"], {"reward": "much"})
        assert bad.status_code == 400
        assert "reward: expected a finite float32 number" in bad.json()["error"]["message"]
        answer = await client.post(
            "/chat/completions", opened["api_key"], {"model": "policy", "messages": [USER]}
        )
        relayed = {"authorization": "Bearer EMPTY", "x-api-key": opened["api_key"]}
        assert (await client.http.get("/models", headers=relayed)).status_code == 200
        for number in (1e39, -1e39, 10**400):
            for path in ("/sessions/end", "/rewards"):
                bad = await client.post(path, opened["api_key"], {"reward": number})
                assert bad.status_code == 400, (path, number, bad.text)
        big = {"reward": 3e38}
        assert (await client.post("/rewards", opened["api_key"], big)).status_code == 200
        bad = await client.post("/rewards", opened["api_key"], big)
        assert "expected a finite float32 number" in bad.text
        assert (await client.post("/rewards", opened["api_key"], {"reward": -3e38})).is_error
        rewards = {answer.json()["id"]: 0.5}
        unknown = {"call_rewards": {**rewards, "chatcmpl-none": 1.0}}
        assert (await client.post("/sessions/end", opened["api_key"], unknown)).status_code == 404
        assert (await client.end(opened, call_rewards=rewards))["stored"]

    served(tmp_path, tiny_tokenizer, use)
    assert (tmp_path / KEY_FILE).stat().st_mode & 0o777 == 0o600
    assert [entry.reward for entry in read_index(tmp_path)] == [3e38]  # once


def test_open_sessions_are_stored_at_the_end_and_at_their_deadline(
    tmp_path: Path, tiny_tokenizer: Any
) -> None:
    async def use(client: Client) -> None:
        await client.chat(await client.open(uid="open"), [USER])

    async def wait(client: Client) -> None:
        await client.chat(await client.open(uid="late"), [USER])
        while len(read_index(tmp_path)) < 2:
            await asyncio.sleep(0.01)

    served(tmp_path, tiny_tokenizer, use)
    served(tmp_path, tiny_tokenizer, wait, "generator.trajectory_timeout_seconds=1")
    found = [(e.uid, e.stop_reason, e.reward, e.turns) for e in read_index(tmp_path)]
    assert found == [("open", "timeout", 0.0, 1), ("late", "timeout", 0.0, 1)]


@pytest.mark.parametrize("with_next", [True, False])
def test_sessions_that_cannot_be_written_are_kept(
    with_next: bool, tmp_path: Path, tiny_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = recording.TrajectoryWriter
    write = writer.write

    def full(*arguments: Any, **options: Any) -> None:
        raise StoreError("the disk is full")

    async def use(client: Client) -> None:
        opened = [await client.open(uid=name) for name in "ab"]
        for one in opened:
            await client.chat(one, [USER])
        monkeypatch.setattr(writer, "write", full)
        answer = await client.post("/sessions/end", opened[0]["api_key"], {"reward": 1})
        assert (answer.status_code, "disk is full" in answer.text) == (500, True)
        monkeypatch.setattr(writer, "write", write)
        if with_next:
            await client.end(opened[1], reward=2)

    served(tmp_path, tiny_tokenizer, use)
    found = [(e.uid, e.reward) for e in read_index(tmp_path)]
    assert found == [("a", 1.0), ("b", 2.0 if with_next else 0.0)]
    assert [row["messages"][-1]["content"] for row in sft_rows(tmp_path)] == ["a0", "a1"]


@pytest.mark.spec("gateway.export-groups")
@pytest.mark.parametrize(("fields", "groups"), [({}, 2), ({"uid": "t"}, 1)])
def test_export_warns_of_groups_of_one(
    fields: dict[str, str],
    groups: int,
    tmp_path: Path,
    tiny_tokenizer: Any,
    capsys: pytest.CaptureFixture[str],
) -> None:
    async def use(client: Client) -> None:
        for _ in range(2):
            session = await client.open(**fields)
            await client.chat(session, [USER])
            await client.end(session, reward=1)

    served(tmp_path, tiny_tokenizer, use)
    out = tmp_path / "batch.safetensors"
    assert cli.main(["export", str(tmp_path), str(out), "--to", "batch"]) == 0
    printed = capsys.readouterr()
    assert f"2 rows of 2 trajectories in {groups} groups in {out}\n" in printed.out
    assert ("warning: each group has one trajectory" in printed.err) == (groups == 2)


@pytest.mark.spec("gateway.export-sft")
def test_another_offer_of_tools_begins_another_row_of_the_export() -> None:
    def call(shared: int, message: str, answer: str, **template: Any) -> dict[str, Any]:
        return {"shared": shared, "messages": [user(message)], "answer": said(answer), **template}

    tools = {"tools": [{"type": "function", "function": {"name": "look"}}]}
    calls = [call(0, "a", "b"), call(2, "c", "d", **tools), call(4, "e", "f", **tools)]
    first = [user("a"), said("b")]
    more = [{**said("b"), "weight": 0}, user("c"), said("d"), user("e"), said("f")]
    assert list(rows_of_calls(calls)) == [
        {"messages": first},
        {"messages": [user("a"), *more], **tools},
    ]


@pytest.mark.spec("gateway.export")
def test_exports_have_the_recorded_tokens(
    tmp_path: Path, tiny_tokenizer: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    served(tmp_path, tiny_tokenizer, conversation)
    batch_file, skyrl_file = tmp_path / "batch.safetensors", tmp_path / "skyrl.json"
    assert cli.main(["export", str(tmp_path), str(batch_file), "--to", "batch"]) == 0
    assert cli.main(["export", str(tmp_path), str(skyrl_file), "--to", "skyrl"]) == 0
    assert "3 rows of 1 trajectories in 1 groups" in capsys.readouterr().out
    end = tiny_tokenizer.eos_token_id
    answers = [[*tiny_tokenizer.encode(f"a{n}"), end] for n in range(3)]
    batch = StepBatch.load(batch_file)
    assert batch.loss_mask.tolist() == [1] * 9
    assert batch.row_rewards.tolist() == [0.0, 0.0, 2.0]
    assert batch.is_last_step.tolist() == [False, False, True]
    assert batch.rollout_logprobs.tolist() == [-0.5] * 9
    output = json.loads(skyrl_file.read_text())
    assert output["response_ids"] == answers
    assert output["trajectory_ids"] == [{"instance_id": "t", "repetition_id": 0}] * 3
    (trajectory,) = read_recorded(tmp_path)
    assert output["prompt_token_ids"] == [step.prompt_token_ids for step in trajectory.steps]
    validate_generator_output(generator_output_from_trajectories([trajectory]), step_wise=True)
    assert read_recorded(tmp_path, min_reward=3.0) == []
    out = str(tmp_path / "none")
    assert cli.main(["export", str(tmp_path), out, "--to", "batch", "--min-reward", "3"]) == 2
    for form in ("batch", "skyrl", "sft"):
        assert cli.main(["export", str(tmp_path), str(tmp_path / "no/x"), "--to", form]) == 2
    assert "no trajectories to export" in capsys.readouterr().err


def with_replay(generation: Generation, call: Call) -> Generation:
    """Return the generation with kept ids, and routes [tokens - 1, 2, 1] that name the place."""
    kept = [np.array([1, token + 1], np.int32) for token in generation.token_ids]
    places = np.arange(len(call.prompt_token_ids) + len(kept) - 1, dtype=np.uint8)
    routes = np.stack([places, places], axis=1)[:, :, None]
    return replace(generation, kept_ids=kept, expert_indices=routes)


@pytest.mark.spec("store.replay")
def test_exports_have_kept_ids_and_routes(tmp_path: Path, tiny_tokenizer: Any) -> None:
    engine: list[tuple[Call, Generation]] = []

    def answer(call: Call, n: int) -> Generation:
        engine.append((call, with_replay(says(tiny_tokenizer, f"a{n}"), call)))
        return engine[-1][1]

    served(tmp_path, tiny_tokenizer, conversation, answer=answer)
    (line,) = (tmp_path / "trajectories" / "eval_step_000001.jsonl").read_text().splitlines()
    shared = [tokens["routes"]["shared"] for tokens in json.loads(line)["tokens"]]
    first = engine[0][0].prompt_token_ids
    response = len(engine[0][1].token_ids)
    assert shared[:2] == [0, len(first) + response - 1] and shared[2] > len(first)
    (trajectory,) = read_recorded(tmp_path)
    for (_, generation), step in zip(engine, trajectory.steps, strict=True):
        assert [ids.tolist() for ids in step.kept_ids] == [i.tolist() for i in generation.kept_ids]
        assert step.kept_ids[0].dtype == np.int32
        assert step.expert_indices.dtype == np.uint8
        assert np.array_equal(step.expert_indices, generation.expert_indices)
    batch_file, skyrl_file = tmp_path / "batch.safetensors", tmp_path / "skyrl.json"
    assert cli.main(["export", str(tmp_path), str(batch_file), "--to", "batch"]) == 0
    batch = StepBatch.load(batch_file)
    assert batch.num_kept.tolist() == [2] * 9
    assert batch.kept_ids.tolist() == [int(i) for _, g in engine for ids in g.kept_ids for i in ids]
    assert batch.cu_experts.diff().tolist() == [len(g.expert_indices) for _, g in engine]
    assert cli.main(["export", str(tmp_path), str(skyrl_file), "--to", "skyrl"]) == 0
    output = json.loads(skyrl_file.read_text())
    assert output["rollout_expert_indices"] == [g.expert_indices.tolist() for _, g in engine]
    assert output["rollout_kept_ids"][1] == [i.tolist() for i in engine[1][1].kept_ids]


def test_each_answer_is_trained_in_one_conversation(
    tmp_path: Path, tiny_tokenizer: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    served(tmp_path, tiny_tokenizer, conversation)
    out = tmp_path / "sft.jsonl"
    assert cli.main(["export", str(tmp_path), str(out), "--to", "sft"]) == 0
    assert capsys.readouterr().out == f"2 conversations in {out}\n"
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert rows == [
        {"messages": [USER, said("a0"), user("more"), said("a1")]},
        {"messages": [USER, {**said("a0"), "weight": 0}, user("other"), said("a2")]},
    ]
    assert [len(chat_of(row, "row")) for row in rows] == [4, 4]
    assert list(sft_rows(tmp_path, min_reward=2.5)) == []
    (tmp_path / "messages.jsonl").unlink()
    assert cli.main(["export", str(tmp_path), str(out), "--to", "sft"]) == 2
    assert "skyrl-fast gateway --record" in capsys.readouterr().err


@pytest.mark.spec("gateway.command-line")
def test_a_model_or_a_configuration_file_is_needed(
    tmp_path: Path, tiny_model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from skyrl_fast.commands.gateway import config_of

    assert cli.main(["gateway", "--record", str(tmp_path)]) == 2
    assert "expected a configuration file or --model" in capsys.readouterr().err
    parsed = cli.command_parser().parse_args(
        ["gateway", "trainer.seed=7", "--model", str(tiny_model_folder), "--engine", "http://a:1"]
    )
    config = config_of(parsed)
    assert config.trainer.seed == 7
    assert (config.generator.max_input_length, config.generator.max_turns) == (768, 10_000)
    assert config.generator.sampling_params.max_generate_length == 256
    assert config.generator.inference_engine.external_server_urls == ["http://a:1"]
    assert (config.agent.port, config.trainer.run_path) == (8080, "runs/gateway")


@pytest.mark.spec("gateway.command-line")
@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ([], ("::1", 0, "runs/gateway")),
        (["agent.port=1", "trainer.run_path=b"], ("::1", 1, "b")),
        (["--host", "a", "--port", "2", "--record", "null"], ("a", 2, "null")),
        *((["--record", name], ("::1", 0, name)) for name in ("#x", "[x]", "a: b", "${x}")),
    ],
)
def test_the_gateways_options_override_the_file(
    words: list[str], wanted: tuple[str, int, str], tmp_path: Path
) -> None:
    from skyrl_fast.commands.gateway import config_of

    path = tmp_path / "config.yaml"
    path.write_text(
        "trainer: {policy: {model: {path: m}}, run_path: runs/mine}\n"
        "agent: {host: '::1', port: 0}\n"
    )
    options = ["gateway", str(path), *words, "--engine", "http://[::1]:8000", "http://b:1"]
    config = config_of(cli.command_parser().parse_args(options))
    assert (config.agent.host, config.agent.port, config.trainer.run_path) == wanted
    servers = config.generator.inference_engine.external_server_urls
    assert servers == ["http://[::1]:8000", "http://b:1"]
