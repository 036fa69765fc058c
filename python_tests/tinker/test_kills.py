"""Servers that are killed at any moment, and answers that are cut off."""

import random
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from _tinker import KEY, RunningServer, datum, new_model, running_server, train
from _tinker_process import MOMENTS, ServerProcess

tinker = pytest.importorskip("tinker", reason="the Tinker SDK is not installed")
types = pytest.importorskip("tinker.types")

TOKENS = (1, 2, 3, 4, 5)
LOST = "the server was started again|there is no model"
# One of each kind of call; the others are slow.
BY_DEFAULT = ("forward_backward inside", "optim_step inside", "save_state after")


@pytest.fixture
def no_telemetry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_TELEMETRY", "0")


def client_of(server: Any) -> Any:
    return tinker.ServiceClient(base_url=server.url, api_key=KEY)


def resume(server: ServerProcess, path: str) -> Any:
    made = client_of(server).create_training_client_from_state_with_optimizer(path)
    return made.result()


def saved_states(server: ServerProcess) -> dict[str, str]:
    """Return the paths of all saved states by their names."""
    headers = {"X-API-Key": KEY}
    answer = httpx.get(f"{server.url}/api/v1/checkpoints", headers=headers, timeout=60)
    paths = [one["tinker_path"] for one in answer.json()["checkpoints"]]
    return {path.rpartition("/")[2]: path for path in paths}


@pytest.mark.spec("tinker.restart", "tinker.paths")
@pytest.mark.parametrize(
    "moments",
    [
        pytest.param(BY_DEFAULT, id="default"),
        pytest.param(tuple(MOMENTS), id="all", marks=[pytest.mark.slow, pytest.mark.ci]),
    ],
)
def test_a_call_in_which_the_server_is_killed_happened_or_did_not(
    tiny_model_folder: Path, tmp_path: Path, no_telemetry: None, moments: tuple[str, ...]
) -> None:
    server = ServerProcess(tiny_model_folder, tmp_path)
    try:
        model = new_model(client_of(server), tiny_model_folder)
        train(model, 2, *TOKENS)
        start = model.save_state("start").result().path
        expected = train(model, 4, *TOKENS)
        for moment in moments:
            model = resume(server, start)
            train(model, 1, *TOKENS)
            server.die_at(moment)
            calls = [
                model.forward_backward([datum(*TOKENS)], "cross_entropy"),
                model.optim_step(types.AdamParams(learning_rate=1e-2)),
                model.save_state("next", overwrite=True),
            ]
            server.wait()
            server.start()
            done = 0
            for call in calls:
                try:
                    call.result(60)
                    done += 1
                except tinker.RequestFailedError as error:
                    assert tinker_words(error), error
            assert done < len(calls)
            states = saved_states(server)
            assert set(states) == ({"start", "next"} if moment == "save_state after" else {"start"})
            # What was saved is the state after the calls before it, and goes on as if undisturbed.
            if "next" in states:
                assert torch.equal(train(resume(server, states["next"]), 2, *TOKENS), expected)
                delete(server, states["next"])
            assert torch.equal(train(resume(server, start), 4, *TOKENS), expected)
    finally:
        server.kill()


def tinker_words(error: Exception) -> bool:
    """Return whether an error says what to do after a restart."""
    return "reate" in str(error) and any(words in str(error) for words in LOST.split("|"))


def delete(server: ServerProcess, path: str) -> None:
    run, kind, name = path.removeprefix("tinker://").split("/")
    url = f"{server.url}/api/v1/training_runs/{run}/checkpoints/{kind}/{name}"
    assert httpx.delete(url, headers={"X-API-Key": KEY}).status_code == 200


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.timeout(900)
@pytest.mark.spec("tinker.resume")
def test_kills_at_random_moments_change_nothing_of_a_run(
    tiny_model_folder: Path, tmp_path: Path, no_telemetry: None
) -> None:
    """A client that saves after each step and resumes from the last state that is there."""
    steps = 30
    moments = random.Random(0)
    killed_at = set(moments.sample(range(steps), 8))

    def one_step(model: Any, step: int) -> torch.Tensor:
        tokens = (1, step + 2, step + 3, 5)
        return train(model, 1, *tokens)

    with running_server(tiny_model_folder, tmp_path / "undisturbed") as calm:
        model = new_model(client_of(calm), tiny_model_folder)
        expected = [one_step(model, step) for step in range(steps)]
    server = ServerProcess(tiny_model_folder, tmp_path)
    got: dict[int, torch.Tensor] = {}
    try:
        model = new_model(client_of(server), tiny_model_folder)
        model.save_state("0").result()
        step = 0
        while step < steps:
            future = model.forward_backward([datum(1, step + 2, step + 3, 5)], "cross_entropy")
            calls = [
                future,
                model.optim_step(types.AdamParams(learning_rate=1e-2)),
                model.save_state(str(step + 1), overwrite=True),
            ]
            if step in killed_at:
                killed_at.remove(step)
                time.sleep(moments.uniform(0.0, 0.05))
                server.kill()
                server.start()
            try:
                answers = [call.result(60) for call in calls]
                got[step] = answers[0].loss_fn_outputs[0]["logprobs"].to_torch()
                step += 1
            except tinker.RequestFailedError as error:
                assert tinker_words(error), error
                states = saved_states(server)
                step = max(map(int, states))
                model = resume(server, states[str(step)])
        assert not killed_at
        for place, values in got.items():
            assert torch.equal(values, expected[place])
        assert steps - 1 in got
    finally:
        server.kill()


# --- answers that are cut off


@pytest.fixture(scope="module")
def server(
    tiny_model_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningServer]:
    with running_server(tiny_model_folder, tmp_path_factory.mktemp("tinker")) as running:
        yield running


def cut_off(server: RunningServer, path: str, content: bytes) -> None:
    """Send a request and close the connection without reading the answer."""
    host, _, port = server.url.removeprefix("http://").partition(":")
    lines = [
        f"POST /api/v1/{path} HTTP/1.1",
        f"Host: {host}",
        f"X-API-Key: {KEY}",
        "Content-Type: application/json",
        f"Content-Length: {len(content)}",
    ]
    head = "\r\n".join(lines).encode() + b"\r\n\r\n"
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(head + content)


@pytest.mark.spec("tinker.once", "tinker.answers")
def test_an_answer_that_was_cut_off_comes_again(
    server: RunningServer, tiny_model_folder: Path, no_telemetry: None
) -> None:
    session = httpx.Client(base_url=f"{server.url}/api/v1/", headers={"X-API-Key": KEY}, timeout=60)

    def ask(path: str, body: dict[str, Any]) -> httpx.Response:
        """Ask twice, once without reading the answer, for the call and for what it gave."""
        cut_off(server, path, httpx.Request("POST", "http://x", json=body).content)
        accepted = session.post(path, json=body).json()
        cut_off(server, "retrieve_future", httpx.Request("POST", "http://x", json=accepted).content)
        answers = [session.post("retrieve_future", json=accepted) for _ in range(2)]
        assert answers[0].status_code == 200 and answers[0].content == answers[1].content
        assert session.post(path, json=body).json() == accepted
        return answers[0]

    client = client_of(server)
    model = new_model(client, tiny_model_folder)
    calm = new_model(client, tiny_model_folder)
    for one in (model, calm):
        one.forward_backward([datum(*TOKENS)], "cross_entropy").result()
    step = {"model_id": model.model_id, "seq_id": 2, "adam_params": {"learning_rate": 1e-2}}
    assert ask("optim_step", step).json()["metrics"]["lr"] == 1e-2
    calm.optim_step(types.AdamParams(learning_rate=1e-2, eps=1e-12)).result()
    save = {"model_id": model.model_id, "seq_id": 3, "path": "cut"}
    assert ask("save_weights", save).json()["path"].endswith("/cut")
    sampling = session.post(
        "create_sampling_session",
        json={"session_id": model.model_id.partition(":")[0], "base_model": str(tiny_model_folder)},
    ).json()
    sample = {
        "sampling_session_id": sampling["sampling_session_id"],
        "seq_id": 1,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]},
        "sampling_params": {"max_tokens": 4, "temperature": 3.0},
    }
    ask("asample", sample)
    resumed = client.create_training_client_from_state_with_optimizer(
        f"tinker://{model.model_id}/weights/cut"
    ).result()
    assert torch.equal(train(resumed, 2, *TOKENS), train(calm, 2, *TOKENS))
