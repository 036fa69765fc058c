"""Clients that repeat, flood, and ask for what cannot be: others are not disturbed."""

import errno
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from _tinker import KEY, RunningServer, TorchSampler, datum, new_model, running_server, train

from skyrl_fast.tinker import start
from skyrl_fast.tinker.app import TinkerApp
from skyrl_fast.tinker.training import AdapterTrainer

tinker = pytest.importorskip("tinker", reason="the Tinker SDK is not installed")
types = pytest.importorskip("tinker.types")

LENGTH = 1024  # of the tiny model
OPEN_FUTURES = 2000
TOKENS = (1, 2, 3, 4)
ZERO = np.zeros(1, np.float32)


@pytest.fixture(autouse=True)
def no_telemetry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_TELEMETRY", "0")


@pytest.fixture(scope="module")
def server(
    tiny_model_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningServer]:
    with running_server(tiny_model_folder, tmp_path_factory.mktemp("tinker")) as running:
        yield running


@pytest.fixture
def client(server: RunningServer) -> Any:
    return tinker.ServiceClient(base_url=server.url, api_key=KEY)


def session_of(server: RunningServer) -> httpx.Client:
    return httpx.Client(base_url=f"{server.url}/api/v1/", headers={"X-API-Key": KEY}, timeout=60)


class TwiceApp(TinkerApp):
    """Handles every POST twice, and gives the client the second answer."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await super().__call__(scope, receive, send)
            return
        content = b""
        more = True
        while more:
            message = await receive()
            content += message.get("body", b"")
            more = message.get("more_body", False)

        async def receive_again() -> dict[str, Any]:
            return {"type": "http.request", "body": content, "more_body": False}

        async def lose(message: Any) -> None:
            pass

        # A session that is opened twice has two names, one of which is not used.
        await super().__call__(dict(scope), receive_again, lose)
        await super().__call__(dict(scope), receive_again, send)


def run_of_a_client(server: RunningServer, model_folder: Path) -> list[Any]:
    """Return what a client sees that creates, trains, saves, samples and resumes."""
    client = tinker.ServiceClient(base_url=server.url, api_key=KEY)
    model = new_model(client, model_folder)
    seen: list[Any] = [train(model, 2, *TOKENS)]
    state = model.save_state("state").result().path
    sampler = model.save_weights_and_get_sampling_client().result()
    named = model.save_weights_for_sampler("named").result().path
    for one in (sampler, client.create_sampling_client(model_path=named).result()):
        params = types.SamplingParams(max_tokens=3, seed=1, stop=[])
        answer = one.sample(types.ModelInput.from_ints([1, 2]), 2, params).result()
        seen += [sequence.tokens for sequence in answer.sequences]
    resumed = client.create_training_client_from_state_with_optimizer(state).result()
    seen.append(train(resumed, 2, *TOKENS))
    names = [one.tinker_path for one in checkpoints(client, model)]
    seen.append([name.rpartition("/")[2] for name in names])
    client.close("success").result(60)
    return seen


def checkpoints(client: Any, model: Any) -> Any:
    return client.create_rest_client().list_checkpoints(model.model_id).result().checkpoints


@pytest.mark.spec("tinker.once")
def test_requests_that_all_arrive_twice_run_once(
    server: RunningServer,
    tiny_model_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected = run_of_a_client(server, tiny_model_folder)
    ran: list[str] = []
    for owner, name in ((AdapterTrainer, "forward_backward"), (TorchSampler, "_sample")):
        function = getattr(owner, name)

        def counting(*args: Any, function: Any = function, name: str = name) -> Any:
            ran.append(name)
            return function(*args)

        monkeypatch.setattr(owner, name, counting)
    monkeypatch.setattr(start, "TinkerApp", TwiceApp)
    with running_server(tiny_model_folder, tmp_path) as twice:
        got = run_of_a_client(twice, tiny_model_folder)
    assert len(got) == len(expected)
    for one, other in zip(got, expected, strict=True):
        assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other
    assert ran.count("forward_backward") == 4
    assert ran.count("_sample") == 2


@pytest.mark.spec("tinker.order", "tinker.clients")
@pytest.mark.timeout(600)
def test_open_futures_of_one_client_do_not_stop_another(
    server: RunningServer, client: Any, tiny_model_folder: Path
) -> None:
    """Thousands of calls wait for the first one of their model, which comes last."""
    flooding = new_model(client, tiny_model_folder)
    calm = new_model(client, tiny_model_folder)
    session = session_of(server)
    step = {"model_id": flooding.model_id, "adam_params": {"learning_rate": 1e-3}}
    accepted = [
        session.post("optim_step", json={**step, "seq_id": number}).json()
        for number in range(2, OPEN_FUTURES + 2)
    ]
    assert len(server.service.futures) >= OPEN_FUTURES
    undisturbed = new_model(client, tiny_model_folder)
    assert torch.equal(train(calm, 2, *TOKENS), train(undisturbed, 2, *TOKENS))
    flooding.forward_backward([datum(*TOKENS)], "cross_entropy").result()
    # The last one is answered, though those before it are not asked for.
    answer = session.post("retrieve_future", json=accepted[-1])
    while answer.status_code == 408:
        answer = session.post("retrieve_future", json=accepted[-1])
    assert answer.json()["metrics"]["lr"] == 1e-3


IMPOSSIBLE = {
    "NaN advantage": (
        datum(1, 2, logprobs=ZERO, advantages=np.array([np.nan], np.float32)),
        "ppo",
        "advantages: expected finite numbers, got nan",
    ),
    "infinite weight": (
        datum(1, 2, weights=np.array([np.inf], np.float32)),
        "cross_entropy",
        "weights: expected finite numbers, got inf",
    ),
    "wrong length": (
        datum(1, 2, 3, logprobs=ZERO, advantages=np.zeros(2, np.float32)),
        "importance_sampling",
        r"logprobs: expected shape \(2,\)",
    ),
    "unknown word": (datum(1, 10**6), "cross_entropy", "expected token ids from 0 to"),
    "unknown word of the input": (
        datum(10**6, 1),
        "cross_entropy",
        "model_input: expected token ids from 0 to",
    ),
    "empty": (
        types.Datum(
            model_input=types.ModelInput.from_ints([]),
            loss_fn_inputs={"target_tokens": np.zeros(0, np.int64), "weights": np.zeros(0)},
        ),
        "cross_entropy",
        "expected 1 to 1024 tokens, got 0",
    ),
    "longer than the model": (
        datum(*[1] * (LENGTH + 2)),
        "cross_entropy",
        "expected 1 to 1024 tokens, got 1025",
    ),
}


@pytest.mark.spec("tinker.refusals", "tinker.nothing-half")
def test_impossible_datums_fail_in_words_and_change_nothing(
    client: Any, tiny_model_folder: Path
) -> None:
    model = new_model(client, tiny_model_folder)
    undisturbed = new_model(client, tiny_model_folder)
    for one in (model, undisturbed):
        one.forward_backward([datum(*TOKENS)], "cross_entropy").result()
    fine = {
        "cross_entropy": datum(5, 6),
        "ppo": datum(5, 6, logprobs=ZERO, advantages=ZERO),
        "importance_sampling": datum(5, 6, logprobs=ZERO, advantages=ZERO),
    }
    for wrong, loss, message in IMPOSSIBLE.values():
        with pytest.raises(tinker.RequestFailedError, match=message) as caught:
            model.forward_backward([fine[loss], wrong], loss).result()
        assert caught.value.category.value == "user"
    for one in (model, undisturbed):
        one.optim_step(types.AdamParams(learning_rate=1e-2)).result()
    assert torch.equal(train(model, 1, *TOKENS), train(undisturbed, 1, *TOKENS))


def test_prompts_at_the_limit_are_answered(client: Any, tiny_model_folder: Path) -> None:
    base = client.create_sampling_client(base_model=str(tiny_model_folder)).result()
    longest = types.ModelInput.from_ints([1] * (LENGTH - 1))
    for max_tokens in (1, 100):
        params = types.SamplingParams(max_tokens=max_tokens, stop=[])
        answer = base.sample(longest, num_samples=1, sampling_params=params).result()
        assert len(answer.sequences[0].tokens) == 1


@pytest.mark.spec("tinker.nothing-half")
def test_a_full_disk_fails_the_save_and_nothing_else(
    client: Any, tiny_model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = new_model(client, tiny_model_folder)
    undisturbed = new_model(client, tiny_model_folder)
    train(model, 2, *TOKENS)
    expected = train(undisturbed, 3, *TOKENS)
    save = AdapterTrainer.save

    def fill_disk(*args: Any, **options: Any) -> None:
        save(*args, **options)
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(AdapterTrainer, "save", fill_disk)
        for call in (
            lambda: model.save_state("state"),
            lambda: model.save_weights_for_sampler("sampler"),
            model.save_weights_and_get_sampling_client,
        ):
            with pytest.raises(tinker.RequestFailedError, match=r"was not saved: .*No space left"):
                call().result()
    assert not checkpoints(client, model)
    assert torch.equal(train(model, 1, *TOKENS), expected)
    assert model.save_state("state").result().path.endswith("/weights/state")
