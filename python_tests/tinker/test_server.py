"""The real SDK's client over HTTP."""

import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from _tinker import (
    KEY,
    RATE,
    RunningServer,
    datum,
    load_adapted,
    new_model,
    running_server,
    train,
)

from skyrl_fast.tinker import app
from skyrl_fast.tinker.training_calls import read_step_numbers

tinker = pytest.importorskip("tinker", reason="the Tinker SDK is not installed")
types = pytest.importorskip("tinker.types")


@pytest.fixture(scope="module", autouse=True)
def no_telemetry() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TINKER_TELEMETRY", "0")
        yield


@pytest.fixture(scope="module")
def server(
    tiny_model_folder: Path, tiny_tokenizer: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("tinker")
    end = tiny_tokenizer.eos_token_id
    with running_server(tiny_model_folder, folder, end) as running:
        yield running


@pytest.fixture
def client(server: RunningServer) -> Iterator[Any]:
    one = tinker.ServiceClient(base_url=server.url, api_key=KEY)
    yield one
    one.close("success").result(60)


@pytest.fixture
def rest(server: RunningServer) -> Any:
    return tinker.RestClient(base_url=server.url, api_key=KEY)


def prompt(*tokens: int) -> Any:
    return types.ModelInput.from_ints(list(tokens))


def logprobs(model: Any, *tokens: int) -> torch.Tensor:
    result = model.forward([datum(*tokens)], "cross_entropy").result()
    return result.loss_fn_outputs[0]["logprobs"].to_torch()


def test_the_guide_runs(
    tiny_model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = Path(__file__).parents[2] / "docs/guide/tinker.md"
    (code,) = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    (name,) = set(re.findall(r'base_model="([^"]+)"', code))
    with running_server(tiny_model_folder, tmp_path, names=(name,)) as server:
        monkeypatch.setenv("TINKER_BASE_URL", server.url)
        monkeypatch.setenv("TINKER_API_KEY", KEY)
        names: dict[str, Any] = {}
        exec(code, names)
        assert names["sampler"].compute_logprobs(prompt(1, 2)).result()[0] is None
        names["client"].close("success").result(60)


def test_a_model_learns_and_is_sampled(client: Any, tiny_model_folder: Path) -> None:
    model = new_model(client, tiny_model_folder)
    assert model.get_info().lora_rank == 8
    before = logprobs(model, 1, 2, 3, 4, 5)
    train(model, 10, 1, 2, 3, 4, 5)
    after = logprobs(model, 1, 2, 3, 4, 5)
    assert (after > before).all()
    sampler = model.save_weights_and_get_sampling_client().result()
    params = types.SamplingParams(max_tokens=4, temperature=0.0)
    answer = sampler.sample(
        prompt(1), num_samples=2, sampling_params=params, include_prompt_logprobs=True
    ).result()
    assert [one.tokens for one in answer.sequences] == [[2, 3, 4, 5]] * 2
    assert len({one.sequence_id for one in answer.sequences}) == 2
    assert answer.sequences[0].logprobs == pytest.approx(after.tolist(), abs=1e-5)
    assert answer.prompt_logprobs == [None]
    values = sampler.compute_logprobs(prompt(1, 2, 3, 4, 5)).result()
    assert values[1:] == pytest.approx(after.tolist(), abs=1e-5)  # PEFT's order of sums


def test_rows_of_many_targets_come_back_in_order(client: Any, tiny_model_folder: Path) -> None:
    model = new_model(client, tiny_model_folder)
    ids = np.array([[2, 9, 4], [3, 3, 7]])
    wide = types.Datum(
        model_input=prompt(1, 2),
        loss_fn_inputs={"target_tokens": ids, "weights": np.ones((2, 3), np.float32)},
    )
    sparse = types.Datum(
        model_input=prompt(*[1] * 4),
        loss_fn_inputs={
            "target_tokens": torch.eye(4, 6, dtype=torch.int64) * 5,
            "weights": torch.eye(4, 6),
        },
    )
    narrow = datum(1, 2, 3)
    result = model.forward([narrow, wide, sparse, narrow], "cross_entropy").result()
    values = [one["logprobs"].to_torch() for one in result.loss_fn_outputs]
    assert [tuple(one.shape) for one in values] == [(2,), (2, 3), (4, 6), (2,)]
    network = load_adapted(tiny_model_folder, None)
    expected = network(torch.tensor([[1, 2]])).logits[0].log_softmax(-1)
    assert torch.allclose(values[1], expected.gather(1, torch.tensor(ids)), atol=1e-5)
    assert torch.allclose(values[0], expected[[0, 1], [2, 3]], atol=1e-5)
    assert torch.equal(values[0], values[3])
    total = values[0].sum() * 2 + values[1].sum() + values[2].diagonal().sum()
    assert result.metrics["loss:sum"] == pytest.approx(-float(total), rel=1e-5)


def test_a_custom_loss_is_its_gradient(client: Any, tiny_model_folder: Path) -> None:
    def squares(data: Any, values: list[torch.Tensor]) -> Any:
        loss = sum((one**2).sum() for one in values)
        return loss, {"custom:sum": float(loss.detach())}

    model = new_model(client, tiny_model_folder)
    by_hand = new_model(client, tiny_model_folder)
    data = [datum(1, 2, 3, 4), datum(1, 2, 9)]
    result = model.forward_backward_custom(data, squares).result()
    values = [logprobs(by_hand, 1, 2, 3, 4), logprobs(by_hand, 1, 2, 9)]
    assert result.metrics["loss:sum"] == pytest.approx(
        float(sum((one**2).sum() for one in values)), rel=1e-5
    )
    weighted = [
        datum(1, 2, 3, 4, weights=-2 * values[0].numpy()),
        datum(1, 2, 9, weights=-2 * values[1].numpy()),
    ]
    by_hand.forward_backward(weighted, "cross_entropy")
    for one in (model, by_hand):
        one.optim_step(types.AdamParams(learning_rate=RATE, eps=1e-6)).result()
    assert torch.allclose(logprobs(model, 1, 2, 3), logprobs(by_hand, 1, 2, 3), atol=1e-4)


@pytest.mark.spec("tinker.frozen")
def test_a_snapshot_is_frozen(client: Any, tiny_model_folder: Path) -> None:
    model = new_model(client, tiny_model_folder)
    train(model, 3, 1, 2, 3, 4)
    sampler = model.save_weights_and_get_sampling_client().result()
    path = model.save_weights_for_sampler("third").result().path
    named = client.create_sampling_client(model_path=path).result()
    then = sampler.compute_logprobs(prompt(1, 2, 3, 4)).result()
    train(model, 27, 1, 2, 3, 4)
    assert sampler.compute_logprobs(prompt(1, 2, 3, 4)).result() == then
    assert named.compute_logprobs(prompt(1, 2, 3, 4)).result() == then
    now = model.save_weights_and_get_sampling_client().result()
    assert now.compute_logprobs(prompt(1, 2, 3, 4)).result()[1] > then[1]
    base = client.create_sampling_client(base_model=str(tiny_model_folder)).result()
    assert base.compute_logprobs(prompt(1, 2, 3, 4)).result()[1] < then[1]


@pytest.mark.spec("tinker.frozen")
def test_inflight_samplers_share_the_newest_weights(client: Any, tiny_model_folder: Path) -> None:
    model = new_model(client, tiny_model_folder)
    first = model.save_weights_and_get_sampling_client(kind="inflight").result()
    before = first.compute_logprobs(prompt(1, 2, 3)).result()
    train(model, 3, 1, 2, 3)
    assert first.compute_logprobs(prompt(1, 2, 3)).result() == before
    second = model.save_weights_and_get_sampling_client(kind="inflight").result()
    after = second.compute_logprobs(prompt(1, 2, 3)).result()
    assert after[1] > before[1]
    assert first.compute_logprobs(prompt(1, 2, 3)).result() == after


@pytest.mark.spec("tinker.resume")
def test_a_run_goes_on_in_another_process(tiny_model_folder: Path, tmp_path: Path) -> None:
    with running_server(tiny_model_folder, tmp_path) as first:
        one = tinker.ServiceClient(base_url=first.url, api_key=KEY)
        model = new_model(one, tiny_model_folder)
        train(model, 3, 1, 2, 3, 4)
        path = model.save_state("third", user_metadata={"step": "3"}).result().path
        expected = train(model, 3, 1, 2, 3, 4)
        one.close("success").result()
    with running_server(tiny_model_folder, tmp_path) as second:
        other = tinker.ServiceClient(base_url=second.url, api_key=KEY)
        resumed = other.create_training_client_from_state_with_optimizer(path).result()
        assert resumed.get_info().lora_rank == 8
        assert torch.equal(train(resumed, 3, 1, 2, 3, 4), expected)
        fresh = other.create_training_client_from_state(path).result()
        assert not torch.equal(train(fresh, 3, 1, 2, 3, 4), expected)
        again = new_model(other, tiny_model_folder)
        again.load_state_with_optimizer(path).result()
        assert torch.equal(train(again, 3, 1, 2, 3, 4), expected)
        other.close("success").result()


def test_checkpoints_are_listed_and_deleted(
    client: Any, rest: Any, tiny_model_folder: Path
) -> None:
    model = new_model(client, tiny_model_folder)
    state = model.save_state("state", ttl_seconds=3600).result().path
    sampler = model.save_weights_for_sampler("sampler").result().path
    assert state == f"tinker://{model.model_id}/weights/state"
    listed = rest.list_checkpoints(model.model_id).result().checkpoints
    assert [one.tinker_path for one in listed] == [state, sampler]
    assert [one.checkpoint_type for one in listed] == ["training", "sampler"]
    assert listed[0].expires_at is not None and listed[1].expires_at is None
    info = rest.get_weights_info_by_tinker_path(state).result()
    assert (info.base_model, info.lora_rank) == (str(tiny_model_folder), 8)
    run = rest.get_training_run(model.model_id).result()
    assert run.last_checkpoint.tinker_path == state
    with pytest.raises(tinker.RequestFailedError, match="state, which exists"):
        model.save_state("state").result()
    model.save_state("state", overwrite=True).result()
    sampling = client.create_sampling_client(model_path=sampler).result()
    rest.delete_checkpoint_from_tinker_path(sampler).result()
    with pytest.raises(tinker.RequestFailedError, match=r"there is no tinker://.*/sampler"):
        sampling.compute_logprobs(prompt(1, 2)).result()
    with pytest.raises(tinker.BadRequestError, match="there is no"):
        client.create_sampling_client(model_path=sampler).result()


REFUSED = {
    "unknown loss": (lambda: ([datum(1, 2)], "huber"), "huber is not served"),
    "stable_reinforce": (
        lambda: ([datum(1, 2)], "stable_reinforce"),
        "loss_fn='importance_sampling'",
    ),
    "infinite advantage": (
        lambda: (
            [datum(1, 2, logprobs=np.zeros(1), advantages=np.array([np.inf], np.float32))],
            "ppo",
        ),
        r"data\[0\].advantages: expected finite numbers, got inf",
    ),
    "no advantages": (
        lambda: ([datum(1, 2, logprobs=np.zeros(1, np.float32))], "ppo"),
        "ppo needs advantages",
    ),
    "length": (
        lambda: ([datum(1, 2, 3, weights=np.ones(3, np.float32))], "cross_entropy"),
        r"weights: expected shape \(2,\), that of target_tokens, got \(3,\)",
    ),
    "an input without effect": (
        lambda: ([datum(1, 2, weights=np.ones(1), mask=np.ones(1))], "cross_entropy"),
        "got mask, which would have no effect",
    ),
    "image": (
        lambda: (
            [
                types.Datum(
                    model_input=types.ModelInput(
                        chunks=[types.ImageChunk(data=b"x", format="png", expected_tokens=1)]
                    ),
                    loss_fn_inputs={"target_tokens": np.ones(1, np.int64)},
                )
            ],
            "cross_entropy",
        ),
        "images and sounds are not served",
    ),
}


@pytest.mark.spec("tinker.refusals")
@pytest.mark.parametrize("case", REFUSED)
def test_wrong_calls_fail_in_words_and_the_model_goes_on(
    client: Any, tiny_model_folder: Path, case: str
) -> None:
    model = new_model(client, tiny_model_folder)
    make, message = REFUSED[case]
    with pytest.raises(tinker.RequestFailedError, match=message) as caught:
        model.forward_backward(*make()).result()
    assert caught.value.category.value == "user"
    before = logprobs(model, 1, 2, 3)
    model.optim_step(types.AdamParams(learning_rate=RATE)).result()  # no gradient was added
    assert torch.equal(logprobs(model, 1, 2, 3), before)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"max_tokens": 0}, "max_tokens: expected a whole number of at least 1, got 0"),
        ({"temperature": -1.0}, "temperature"),
        ({"top_p": 1.5}, "top_p"),
        ({"stop": [10**6]}, "stop"),
    ],
)
def test_wrong_samples_fail_in_words(
    client: Any, tiny_model_folder: Path, params: dict[str, Any], message: str
) -> None:
    base = client.create_sampling_client(base_model=str(tiny_model_folder)).result()
    wrong = types.SamplingParams(**{"max_tokens": 2, **params})
    with pytest.raises(tinker.RequestFailedError, match=message):
        base.sample(prompt(1), num_samples=1, sampling_params=wrong).result()
    with pytest.raises(tinker.RequestFailedError, match="prompt: expected at most 1023 tokens"):
        base.compute_logprobs(prompt(*[1] * 1024)).result()
    fine = types.SamplingParams(max_tokens=2, stop=[])
    answer = base.sample(prompt(1), num_samples=1, sampling_params=fine).result()
    assert len(answer.sequences[0].tokens) == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 33}, "rank: expected 1 to 32"),
        ({"base_model": "another/model"}, "base_model: this server has"),
        ({"optimizer": "dimuon"}, "optimizer_config: expected adamw, got dimuon"),
    ],
)
def test_impossible_models_are_refused(
    client: Any, tiny_model_folder: Path, options: dict[str, Any], message: str
) -> None:
    if "optimizer" in options:
        options = {"optimizer": types.DimuonOptimizerConfig()}
    with pytest.raises(tinker.RequestFailedError, match=message):
        client.create_lora_training_client(
            **{"base_model": str(tiny_model_folder), **options}
        ).result()


@pytest.mark.spec("tinker.paths")
@pytest.mark.parametrize(
    "path",
    [
        "tinker://../../etc",
        "tinker://a/weights/..",
        "tinker://a/weights/%2e%2e",
        "tinker://nobody:train:0/weights/x",
        "tinker:///weights/x",
    ],
)
def test_foreign_paths_lead_nowhere(client: Any, path: str) -> None:
    with pytest.raises(tinker.BadRequestError, match="path: "):
        client.create_sampling_client(model_path=path).result()
    with pytest.raises(tinker.RequestFailedError, match="path: "):
        client.create_training_client_from_state(path).result()


def test_names_of_checkpoints_stay_in_the_folder(client: Any, tiny_model_folder: Path) -> None:
    model = new_model(client, tiny_model_folder)
    for name in ("../up", "a/b", ".hidden"):
        with pytest.raises(tinker.RequestFailedError, match="path: expected a name"):
            model.save_state(name).result()
    assert model.save_state("fine-1.0_b").result().path.endswith("/fine-1.0_b")


@pytest.mark.spec("tinker.key", "tinker.sdk")
def test_a_wrong_key_or_sdk_is_refused(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(tinker.AuthenticationError, match="wrong API key"):
        tinker.ServiceClient(base_url=server.url, api_key="tml-wrong").create_sampling_client(
            base_model="x"
        )
    holder = "tinker.lib.internal_client_holder.tinker_sdk_version"
    said = r"is for the Tinker SDK 0\.28 to 0\.38, got .*: pip install 'tinker>=0\.28,<0\.39'"
    for version in ("0.25.0", "0.99.0"):
        monkeypatch.setattr(holder, version)
        with pytest.raises(tinker.BadRequestError, match=said):
            tinker.ServiceClient(base_url=server.url, api_key=KEY).create_sampling_client(
                base_model="x"
            )


def test_an_unloaded_model_says_what_to_do(
    client: Any, server: RunningServer, tiny_model_folder: Path
) -> None:
    model = new_model(client, tiny_model_folder)
    train(model, 1, 1, 2)
    server.run(server.service.models.unload_model({"model_id": model.model_id}))
    with pytest.raises(tinker.RequestFailedError, match="create_training_client_from_state"):
        model.optim_step(types.AdamParams()).result()


def test_a_call_that_is_sent_twice_runs_once(
    server: RunningServer, client: Any, tiny_model_folder: Path
) -> None:
    once = new_model(client, tiny_model_folder)
    twice = new_model(client, tiny_model_folder)
    session = tinker_session(server)
    for model, times in ((once, 1), (twice, 3)):
        model.forward_backward([datum(1, 2, 3)], "cross_entropy").result()
        body = {
            "model_id": model.model_id,
            "seq_id": 2,
            "adam_params": {"learning_rate": RATE},
        }
        answers = [session.post("optim_step", json=body).json() for _ in range(times)]
        assert len({one["request_id"] for one in answers}) == 1
        fetched = [session.post("retrieve_future", json=answers[0]) for _ in range(times)]
        assert {one.status_code for one in fetched} == {200}
        assert len({one.content for one in fetched}) == 1
        other = session.post("optim_step", json={**body, "adam_params": {"learning_rate": 1.0}})
        failed = session.post("retrieve_future", json=other.json()).json()
        assert failed["category"] == "user" and "2 was another call" in failed["error"]
        model._request_id_counter = 2
        model._turn_counter = 2
    assert torch.equal(logprobs(once, 1, 2, 3), logprobs(twice, 1, 2, 3))


def tinker_session(server: RunningServer) -> httpx.Client:
    return httpx.Client(base_url=f"{server.url}/api/v1/", headers={"X-API-Key": KEY}, timeout=60)


def test_unknown_paths_and_broken_bodies_are_answered(server: RunningServer) -> None:
    session = tinker_session(server)
    answer = session.get("billing/usage")
    assert answer.status_code == 404 and "/api/v1/billing/usage is not served" in answer.text
    assert session.post("get_info", content=b"{").status_code == 400
    assert session.post("get_info", content=b"[1]").status_code == 400
    assert session.post("retrieve_future", json={"request_id": "sample-x-1"}).status_code == 410
    assert session.post("session_heartbeat", json={"session_id": "gone"}).status_code == 410
    assert session.post("telemetry", content=b"anything").status_code == 200
    future = session.post("forward_backward", content=b"\xff\xff").json()
    failed = session.post("retrieve_future", json=future).json()
    assert failed["category"] == "user" and "no protobuf message" in failed["error"]
    assert session.get("healthz", headers={"Origin": "http://a.page"}).status_code == 403


@pytest.mark.spec("tinker.refusals")
@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"rank": None}, "lora_config.rank: expected a whole number, got None"),
        ({"rank": "8"}, "lora_config.rank: expected a whole number, got 8"),
        ({"rank": 8, "seed": 1.5}, "lora_config.seed: expected a whole number, got 1.5"),
    ],
)
def test_values_of_another_type_are_the_callers_error(
    server: RunningServer, tiny_model_folder: Path, values: dict[str, Any], message: str
) -> None:
    """As of a client that is not the SDK, which checks types itself."""
    session = tinker_session(server)
    opened = session.post("create_session", json={"sdk_version": tinker.__version__}).json()
    body = {
        "session_id": opened["session_id"],
        "model_seq_id": 0,
        "base_model": str(tiny_model_folder),
        "lora_config": {"train_unembed": False, **values},
    }
    future = session.post("create_model", json=body).json()
    failed = session.post("retrieve_future", json=future).json()
    assert (failed["category"], failed["error"]) == ("user", message)


@pytest.mark.spec("tinker.heartbeats")
def test_a_silent_session_ends_and_others_go_on(
    server: RunningServer, client: Any, tiny_model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    silent = tinker.ServiceClient(base_url=server.url, api_key=KEY)
    lost = new_model(silent, tiny_model_folder)
    kept = new_model(client, tiny_model_folder)
    session = server.service.sessions.find(silent.holder.get_session_id())
    session.heard_at -= 1e6
    server.run(server.service.tick())
    with pytest.raises(tinker.RequestFailedError, match="session has ended"):
        lost.optim_step(types.AdamParams()).result()
    assert len(logprobs(kept, 1, 2, 3)) == 2


def test_chunks_in_any_order_are_one_call(
    server: RunningServer, client: Any, tiny_model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [datum(1, n, n + 1, 4) for n in range(2, 12)]
    whole = new_model(client, tiny_model_folder)
    whole.forward_backward(rows, "cross_entropy").result()
    # Four chunks, of which the client sends the first one last.
    monkeypatch.setitem(app.CLIENT_CONFIG, "fwdbwd_max_chunk_len", 3)
    divided = new_model(tinker.ServiceClient(base_url=server.url, api_key=KEY), tiny_model_folder)
    future = divided.forward_backward(rows, "cross_entropy")
    for model in (whole, divided):
        model.optim_step(types.AdamParams(learning_rate=RATE, eps=1e-6)).result()
    assert len(future.result().loss_fn_outputs) == len(rows)
    assert divided._request_id_counter == 4 + 1
    assert torch.allclose(logprobs(whole, 1, 2, 3), logprobs(divided, 1, 2, 3), atol=1e-4)


@pytest.mark.spec("tinker.clients")
def test_clients_of_different_ranks_do_not_disturb_each_other(
    client: Any, tiny_model_folder: Path
) -> None:
    def work(model: Any, rate: float, tokens: tuple[int, ...]) -> torch.Tensor:
        for _ in range(4):
            model.forward_backward([datum(*tokens)], "cross_entropy")
            model.optim_step(types.AdamParams(learning_rate=rate)).result()
        return logprobs(model, *tokens)

    jobs = {8: (1e-3, (1, 2, 3, 4)), 32: (1e-2, (9, 8, 7))}
    alone = {
        rank: work(new_model(client, tiny_model_folder, rank), *job) for rank, job in jobs.items()
    }
    models = {rank: new_model(client, tiny_model_folder, rank) for rank in jobs}
    results: dict[int, torch.Tensor] = {}
    threads = [
        threading.Thread(target=lambda r=r: results.update({r: work(models[r], *jobs[r])}))
        for r in jobs
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    for rank, expected in alone.items():
        assert torch.equal(results[rank], expected)


def test_strict_servers_refuse_what_they_would_leave_out(
    tiny_model_folder: Path, tmp_path: Path
) -> None:
    with running_server(
        tiny_model_folder, tmp_path, strict=True, names=("tiny/model", "other")
    ) as server:
        one = tinker.ServiceClient(base_url=server.url, api_key=KEY)
        with pytest.raises(tinker.RequestFailedError, match="train_unembed"):
            one.create_lora_training_client(base_model="tiny/model").result()
        model = one.create_lora_training_client(
            base_model="tiny/model", train_unembed=False
        ).result()
        assert model.get_info().model_data.model_name == "tiny/model"
        other = one.create_lora_training_client(base_model="other", train_unembed=False).result()
        assert other.get_info().model_data.model_name == "other"
        one.close("success").result()


def test_only_the_first_client_is_warned_of_the_head(
    tiny_model_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with running_server(tiny_model_folder, tmp_path) as server:
        session = tinker_session(server)
        body = {"sdk_version": tinker.__version__}
        opened = [session.post("create_session", json=body).json() for _ in range(3)]
    warnings = [one["warning_message"] for one in opened]
    assert "train_unembed" in warnings[0] and warnings[1:] == [None, None]
    logged = [one for one in caplog.messages if "train_unembed" in one]
    assert len(logged) == 1


def test_tuning_numbers_of_a_step_are_checked() -> None:
    for name, value in (("learning_rate", -1.0), ("beta1", 1.0), ("eps", float("nan"))):
        with pytest.raises(
            ValueError, match=f"adam_params.{name}: expected a number (of at least|from) 0"
        ):
            read_step_numbers({"adam_params": {name: value}})
