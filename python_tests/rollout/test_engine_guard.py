"""Who may control `skyrl-fast engine`: the attacks on vLLM's development server, and the key."""

import asyncio
import json
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from _asgi import Recorder
from _weights import CHOICE, file_call

from skyrl_fast import cli
from skyrl_fast.commands import engine as engine_command
from skyrl_fast.config import SamplingParams
from skyrl_fast.rollout.engine.api_key import engine_key
from skyrl_fast.rollout.engine.protocol import EngineDeadError
from skyrl_fast.rollout.engine.remote import RemoteEngine
from skyrl_fast.rollout.engine.serve_guard import (
    ADAPTER_VARIABLE,
    CLAIM_AGAIN,
    CLAIM_FIRST,
    CLAIM_HEADER,
    LOAD_ADAPTER,
    READS_GPU_VARIABLE,
    TRAINER_HEADER,
    EngineGuard,
    guard_environment,
)
from skyrl_fast.rollout.engine.serve_vllm import serve_command, serve_environment
from skyrl_fast.rollout.engine.vllm_start import VllmSetup
from skyrl_fast.rollout.engine.weights.transports.file import check_path
from skyrl_fast.system.child_environment import KEY_VARIABLE
from skyrl_fast.system.http_guard import HttpGuard, RefusedError

KEY = "k" * 32
HEADERS = {"authorization": f"Bearer {KEY}"}


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """A shared folder with weights, and what must not be loaded from in and around it."""
    folder = tmp_path / "shared"
    for name in ("skyrl_fast-weights-1", "skyrl_fast-weights-2", "others"):
        (folder / name).mkdir(parents=True)
        (folder / name).chmod(0o700)
        (folder / name / "weights.safetensors").write_text("")
    (folder / "skyrl_fast-weights-1/more.safetensors").write_text("")
    (folder / "link").symlink_to(folder / "skyrl_fast-weights-1")
    outside = tmp_path / "skyrl_fast-weights-3"
    outside.mkdir()
    (outside / "weights.safetensors").write_text("")
    (folder / "skyrl_fast-weights-4").symlink_to(outside)
    (folder / "skyrl_fast-weights-5").mkdir()
    (folder / "skyrl_fast-weights-5/weights.safetensors").symlink_to("/etc/passwd")
    return folder


@pytest.fixture
def app() -> Recorder:
    return Recorder()


@pytest.fixture
def guard(app: Recorder, shared: Path, monkeypatch: pytest.MonkeyPatch) -> HttpGuard:
    for name, value in guard_environment(KEY, [shared]).items():
        monkeypatch.setenv(name, value)
    return EngineGuard(app)


def ask(guard: Any, method: str, path: str, **arguments: Any) -> int:
    async def go() -> int:
        transport = httpx.ASGITransport(guard)
        async with httpx.AsyncClient(transport=transport, base_url="http://engine") as client:
            answer = await client.request(method, path, **arguments)
            assert str(KEY) not in answer.text
            return answer.status_code

    return asyncio.run(go())


def call(guard: HttpGuard, body: Any) -> int:
    return ask(guard, "POST", "/collective_rpc", json=body, headers=HEADERS)


@pytest.mark.spec("engine.claim")
def test_a_server_is_its_latest_trainers(guard: HttpGuard, app: Recorder) -> None:
    """And of none after a restart, until the trainer has connected again."""

    def request(trainer: str | None, claim: str | None = None) -> int:
        headers = {TRAINER_HEADER: trainer, CLAIM_HEADER: claim}
        given = {name: value for name, value in headers.items() if value is not None}
        return ask(guard, "GET", "/v1/models", headers=HEADERS | given)

    assert request("a") == 409
    assert [request("a", CLAIM_FIRST), request("a")] == [200, 200]
    assert [request("b", CLAIM_FIRST), request("b"), request("a")] == [200, 200, 409]
    assert request("a", CLAIM_AGAIN) == 409  # it does not take the server back
    assert request(None) == 200
    guard = EngineGuard(app)
    assert [request("b"), request("b", CLAIM_AGAIN), request("b")] == [409, 200, 200]


@pytest.mark.spec("update.node-engines")
def test_only_a_server_that_shares_its_gpus_can_be_put_to_sleep(
    app: Recorder, shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in guard_environment(KEY, [shared], sleeps=True).items():
        monkeypatch.setenv(name, value)
    guard = EngineGuard(app)

    def status(path: str) -> int:
        return ask(guard, "POST", path, headers=HEADERS)

    allowed = ["/sleep?level=1&mode=abort", "/wake_up?tags=weights", "/wake_up?tags=kv_cache"]
    assert [status(path) for path in allowed] == [200, 200, 200]
    for path in ("/sleep", "/sleep?level=2&mode=abort", "/wake_up", "/wake_up?tags=all"):
        assert status(path) == 400
    assert ask(guard, "POST", allowed[0]) == 401
    assert [path for _, path, _ in app.passed] == ["/sleep", "/wake_up", "/wake_up"]


@pytest.mark.spec("engine.guard")
def test_requests_of_a_trainer_pass(guard: HttpGuard, app: Recorder, shared: Path) -> None:
    weights = str(shared / "skyrl_fast-weights-1/weights.safetensors")

    async def go() -> None:
        async with RemoteEngine("http://engine", api_key=KEY, transport=transport()) as engine:
            await engine.interrupt()
            await engine.resume()
            await engine.reset_prefix_cache()
            await engine.load_weights(file_call(weights))
            await engine.generate([1], SamplingParams(), session_id="s", policy_version=0)

    def transport() -> Any:
        receipt = {"digests": {}, "unloaded": [], "dtype": "float32"}
        answers = {
            "/v1/models": {"data": [{"id": "m"}]},
            "/v1/completions": {"choices": [CHOICE]},
            "apply_patches": {"results": [None]},
            "weights_dtype": {"results": ["float32"]},
            "load_weights_file": {"results": [receipt]},
        }

        async def answer(request: httpx.Request) -> httpx.Response:
            passed = await httpx.ASGITransport(guard).handle_async_request(request)
            assert passed.status_code == 200, request.url
            name = request.url.path
            if name == "/collective_rpc":
                name = json.loads(request.content)["method"]
            return httpx.Response(200, json=answers.get(name, {}))

        return httpx.MockTransport(answer)

    asyncio.run(go())
    assert [path for _, path, _ in app.passed] == [
        "/health",
        "/v1/models",
        "/resume",
        "/collective_rpc",
        "/collective_rpc",
        "/pause",
        "/resume",
        "/reset_prefix_cache",
        "/collective_rpc",
        "/reset_prefix_cache",
        "/v1/completions",
    ]


@pytest.mark.parametrize(
    "body",
    [
        {"method": "save_sharded_state", "args": ["FOLDER"]},
        {"method": "__class__"},
        {"method": "end_with_parent"},
        {"method": "load_weights_ipc", "args": [[]]},
        {"method": "load_weights_broadcast", "args": []},
        {"method": "join_weights_group", "args": ["gloo", "10.0.0.1", 1, 2]},
        {"method": "weights_dtype", "args": []},
        {"method": "load_weights_file"},
        {"method": "load_weights_file", "args": []},
        {"method": "load_weights_file", "args": ["WEIGHTS", "WEIGHTS"]},
        {"method": "load_weights_file", "args": ["WEIGHTS"], "kwargs": {}},
        {"method": "load_weights_file", "args": ["WEIGHTS"], "timeout": 1e-9},
        {
            "method": "load_weights_file",
            "args": ["WEIGHTS"],
            "kwargs": {"adapter": "{}", "versions": {"": 1}},
        },
        {"method": "load_weights_file", "args": [["WEIGHTS"]]},
        {"method": ["load_weights_file"], "args": ["WEIGHTS"]},
        {"method": "reload_weights", "kwargs": {"weights_path": "/etc"}},
        {"method": "reload_weights", "kwargs": {"weights_path": "FOLDER", "is_checkpoint": 1}},
        {"method": "reload_weights", "kwargs": {}},
        {},
        [],
        "x",
        1,
    ],
    ids=str,
)
def test_other_calls_of_the_worker_are_refused(
    body: Any, guard: HttpGuard, app: Recorder, shared: Path
) -> None:
    folder = str(shared / "skyrl_fast-weights-1")
    text = json.dumps(body).replace("WEIGHTS", f"{folder}/weights.safetensors")
    assert call(guard, json.loads(text.replace("FOLDER", folder))) == 403
    assert app.passed == []


@pytest.mark.parametrize(
    ("method", "args", "passes"),
    [
        ("join_weights_group", ["gloo", "10.0.0.1", 4000, 3], True),
        ("join_weights_group", ["nccl", "10.0.0.1", 4000, 3], True),
        ("join_weights_group", ["gloo", "10.0.0.2", 4000, 3], False),  # another trainer's address
        ("join_weights_group", ["mpi", "10.0.0.1", 4000, 3], False),
        ("join_weights_group", ["gloo", "10.0.0.1", 1 << 16, 3], False),
        ("join_weights_group", ["gloo", "10.0.0.1", 4000, 1], False),
        ("join_weights_group", ["gloo", "10.0.0.1", 4000], False),
        ("load_weights_broadcast", [], True),
        ("load_weights_broadcast", [[]], False),
    ],
)
def test_a_broadcast_comes_from_the_servers_trainer(
    method: str,
    args: list[Any],
    passes: bool,
    app: Recorder,
    shared: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in guard_environment(KEY, [shared], trainer="10.0.0.1").items():
        monkeypatch.setenv(name, value)
    body = {"method": method, "args": args}
    assert call(EngineGuard(app), body) == (200 if passes else 403)
    assert call(EngineGuard(app), {**body, "timeout": 1}) == 403
    assert len(app.passed) == passes


@pytest.mark.spec("async.rank-ipc")
@pytest.mark.parametrize("reads_gpu", [True, False])
def test_handles_of_gpu_memory_are_for_servers_of_the_run_alone(
    reads_gpu: bool, app: Recorder, shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: Any = {"trainer": "127.0.0.1", "reads_gpu": reads_gpu}
    for name, value in guard_environment(KEY, [shared], **options).items():
        monkeypatch.setenv(name, value)
    guard = EngineGuard(app)
    handle = [64, 0, "00ff", 64, 0, False, "0a", 3, "0b", True]
    calls = {
        "load_weights_rank_ipc": [json.dumps({"GPU-0": handle})],
        "join_weights_group": ["ipc", "127.0.0.1", 4000, 3],
    }
    for method, arguments in calls.items():
        body = {"method": method, "args": arguments}
        assert call(guard, body) == (200 if reads_gpu else 403)
    assert len(app.passed) == 2 * reads_gpu
    # What it does not read there comes by no other way, and other values are no handles.
    others = {
        "load_weights_rank_ipc": [json.dumps({"GPU-0": handle[:-1]})],
        "load_weights_ipc": [[]],
    }
    if reads_gpu:
        others["join_weights_group"] = ["gloo", "127.0.0.1", 4000, 3]
    for method, arguments in others.items():
        assert call(guard, {"method": method, "args": arguments}) == 403


def test_only_a_server_that_the_run_starts_may_read_gpus() -> None:
    with pytest.raises(ValueError, match=r"weight_sync: expected one of .* got 'ipc'"):
        RemoteEngine("http://127.0.0.1:1", weight_sync="ipc")
    setup = VllmSetup("model")
    assert READS_GPU_VARIABLE not in serve_environment(setup, {}, key=KEY)
    access = {"trainer": "127.0.0.1", "reads_gpu": True}
    assert READS_GPU_VARIABLE in serve_environment(setup, {}, key=KEY, **access)


LORA = {"r": 8, "lora_alpha": 16, "target_modules": ["q_proj"]}


def test_a_server_takes_the_adapter_of_its_settings_alone(
    app: Recorder, shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = guard_environment(KEY, [shared], trainer="10.0.0.1", adapter=LORA)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    guard = EngineGuard(app)
    weights = str(shared / "skyrl_fast-weights-1/weights.safetensors")
    right = {"adapter": json.dumps(LORA), "versions": {"": 3}}
    for method, args in (("load_weights_file", [weights]), ("load_weights_broadcast", [])):
        body = {"method": method, "args": args}
        assert call(guard, {**body, "kwargs": right}) == 200
        assert json.loads(app.passed[-1][2]) == {**body, "kwargs": right}
        for wrong in (
            {"adapter": json.dumps({**LORA, "lora_alpha": 32})},
            {"adapter": LORA},
            {"versions": {"": 0}},
            {"versions": {"": "3"}},
            {"versions": {"": 3, "planner": 4}},
            {"versions": {"planner": 3}},
            {"path": "/etc"},
        ):
            assert call(guard, {**body, "kwargs": {**right, **wrong}}) == 403
        assert call(guard, body) == 403  # the model's weights, with the adapter merged in
    assert len(app.passed) == 2


@pytest.mark.spec("lora.servers")
@pytest.mark.vllm
def test_a_server_serves_the_last_adapter_under_its_own_name(
    app: Recorder, shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in guard_environment(KEY, [shared], adapter=LORA).items():
        monkeypatch.setenv(name, value)
    served: dict[str, Any] = {}
    models = SimpleNamespace(openai_serving_models=SimpleNamespace(lora_requests=served))
    inner = EngineGuard(app)

    async def guard(scope: Any, receive: Any, send: Any) -> None:
        await inner({**scope, "app": SimpleNamespace(state=models)}, receive, send)

    def name(**body: Any) -> int:
        return ask(guard, "POST", LOAD_ADAPTER, json=body, headers=HEADERS)

    for version in (1, 2):
        assert name(lora_name=f"policy-{version}", version=version) == 200
        ((key, request),) = served.items()
        assert (key, request.lora_name, request.lora_int_id) == (
            *(f"policy-{version}", f"policy-{version}", version),
        )
    assert name(lora_name="policy-3", lora_path="/etc") == 403
    assert name(lora_name="x" * 1000, version=3) == 403
    assert [*served] == ["policy-2"] and app.passed == []
    monkeypatch.delenv(ADAPTER_VARIABLE)
    inner = EngineGuard(app)
    assert name(lora_name="policy-3", version=3) == 404


@pytest.mark.parametrize("content", [b"{", b"\xff", b"[" * 100_000, b'{"a": ' + b"9" * 5000 + b"}"])
def test_calls_that_are_no_json_are_refused(
    content: bytes, guard: HttpGuard, app: Recorder
) -> None:
    headers = {**HEADERS, "content-type": "application/json"}
    assert ask(guard, "POST", "/collective_rpc", content=content, headers=headers) == 400
    assert app.passed == []


def test_repeated_key_cannot_hide_a_method(guard: HttpGuard, app: Recorder, shared: Path) -> None:
    path = shared / "skyrl_fast-weights-1/weights.safetensors"
    body = f'{{"method": "__class__", "method": "load_weights_file", "args": ["{path}"]}}'
    headers = {**HEADERS, "content-type": "application/json"}
    assert ask(guard, "POST", "/collective_rpc", content=body, headers=headers) == 200
    ((_, _, passed),) = app.passed
    assert json.loads(passed) == {"method": "load_weights_file", "args": [str(path)]}
    assert passed.count(b"method") == 1


@pytest.mark.parametrize(
    "path",
    [
        "/etc/passwd",
        "/nowhere",
        "",
        ".",
        "\0",
        "a" * 5000,
        "SHARED",
        "SHARED/skyrl_fast-weights-1",
        "SHARED/skyrl_fast-weights-1/more.safetensors",
        "SHARED/others/weights.safetensors",
        "SHARED/../skyrl_fast-weights-3/weights.safetensors",
        "SHARED/skyrl_fast-weights-4/weights.safetensors",
        "SHARED/skyrl_fast-weights-5/weights.safetensors",
        "SHARED/skyrl_fast-weights-9/weights.safetensors",
    ],
)
def test_only_weights_in_the_shared_folder_are_loaded(
    path: str, guard: HttpGuard, app: Recorder, shared: Path
) -> None:
    named = path.replace("SHARED", str(shared))
    assert call(guard, {"method": "load_weights_file", "args": [named]}) == 403
    assert app.passed == []


def test_weights_that_other_users_could_have_written_are_refused(
    guard: HttpGuard, app: Recorder, shared: Path
) -> None:
    folder = shared / "skyrl_fast-weights-1"
    body = {"method": "load_weights_file", "args": [str(folder / "weights.safetensors")]}
    folder.chmod(0o777)
    assert call(guard, body) == 403
    assert app.passed == []
    folder.chmod(0o700)
    path = str(folder / "weights.safetensors")
    assert check_path(path, [shared]) == Path(path)
    with pytest.raises(RefusedError):
        check_path(path, [shared], user=folder.stat().st_uid + 1)


def test_links_are_resolved_before_weights_are_loaded(
    guard: HttpGuard, app: Recorder, shared: Path
) -> None:
    path = shared / "skyrl_fast-weights-1/weights.safetensors"
    link = str(shared / "link/weights.safetensors")
    assert call(guard, {"method": "load_weights_file", "args": [link]}) == 200
    body = {"method": "reload_weights", "kwargs": {"weights_path": str(path.parent)}}
    assert call(guard, body) == 200
    assert [json.loads(passed) for _, _, passed in app.passed] == [
        {"method": "load_weights_file", "args": [str(path)]},
        body,
    ]


@pytest.mark.parametrize(
    ("path", "status"),
    [
        *((path, 404) for path in ("/update_weights", "/sleep", "/abort_requests", "/metrics")),
        *(
            (path, 404)
            for path in ("/v1/load_lora_adapter", "/invocations", "/ping", "/server_info")
        ),
        *((path, 404) for path in ("/init_weight_transfer_engine", "/scale_elastic_ep", "/docs")),
        ("/pause", 400),  # other than a trainer's: "keep" hangs every request
        ("/pause?mode=keep", 400),
    ],
)
def test_other_routes_do_not_exist(path: str, status: int, guard: HttpGuard, app: Recorder) -> None:
    assert ask(guard, "POST", path, headers=HEADERS) == status
    assert app.passed == []


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        ({"authorization": "Bearer wrong"}, 401),
        ({**HEADERS, "origin": "http://evil.example"}, 403),
        ({"origin": "http://evil.example", "content-type": "text/plain"}, 403),
    ],
)
def test_web_pages_and_other_users_are_refused(
    headers: dict[str, str], status: int, guard: HttpGuard, app: Recorder
) -> None:
    for method, path in (("POST", "/pause?mode=abort&clear_cache=false"), ("GET", "/health")):
        assert ask(guard, method, path, headers=headers) == status
    body = b'{"method":"save_sharded_state","args":["/tmp"]}'
    assert ask(guard, "POST", "/collective_rpc", content=body, headers=headers) == status
    assert app.passed == []


# --- the key -------------------------------------------------------------------------------------


def test_key_is_created_for_its_owner_alone_and_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    file = tmp_path / "run/engine_key"
    before = os.umask(0)
    try:
        key = engine_key(file)
    finally:
        os.umask(before)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert len(key) == 43  # 256 random bits
    assert engine_key(file) == key
    assert engine_key(tmp_path / "other/engine_key") != key
    assert [path.name for path in file.parent.iterdir()] == ["engine_key"]


def test_variable_takes_precedence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    assert engine_key(tmp_path / "engine_key") == KEY
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setenv(KEY_VARIABLE, "short")
    with pytest.raises(
        ValueError, match="SKYRL_FAST_ENGINE_KEY: expected a key of 16 to 1024"
    ) as got:
        engine_key(tmp_path / "engine_key")
    assert "short" not in str(got.value).replace("short,", "")


def test_key_that_others_could_read_or_replace_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    file = tmp_path / "engine_key"
    engine_key(file)
    file.chmod(0o640)
    with pytest.raises(ValueError, match=r"api_key_file: .*mode 600, got .* mode 640: chmod 600"):
        engine_key(file)
    file.chmod(0o600)
    link = tmp_path / "link"
    link.symlink_to(file)
    with pytest.raises(ValueError, match="api_key_file: cannot read or create"):
        engine_key(link)
    file.write_text("two words and more\n")
    with pytest.raises(ValueError, match="without spaces"):
        engine_key(file)
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(ValueError, match="expected a file"):
        engine_key(tmp_path / "pipe")


def test_server_and_trainer_use_the_key_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from skyrl_fast.config.loading import load_config
    from skyrl_fast.rollout.engine.from_settings import make_engines

    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").write_text("")
    overrides = [
        "data.train_data=[a]",
        f"trainer.policy.model.path={model}",
        f"trainer.run_path={tmp_path}/run",
        "generator.inference_engine.run_engines_locally=false",
        "generator.inference_engine.external_server_urls=['http://127.0.0.1:1']",
    ]
    started: list[dict[str, str]] = []

    def execve(program: str, command: list[str], environment: Mapping[str, str]) -> None:
        assert not any(key in " ".join(command) for key in environment.values() if len(key) == 43)
        started.append({**environment})
        raise KeyboardInterrupt

    (tmp_path / "c.yaml").write_text("{}")
    options = cli.command_parser().parse_args(["engine", str(tmp_path / "c.yaml"), *overrides])
    with pytest.raises(KeyboardInterrupt):
        engine_command.run(options, execute=execve)
    key = (tmp_path / "run/engine_key").read_text().strip()
    assert started[0][KEY_VARIABLE] == key
    (engine,) = make_engines(load_config(None, overrides), str(model))
    assert isinstance(engine, RemoteEngine)
    assert engine.headers == {"authorization": f"Bearer {key}"}


def test_server_is_started_with_the_guard() -> None:
    command = serve_command(VllmSetup("model", max_model_len=8), host="127.0.0.1", port=1)
    at = command.index("--middleware")
    assert command[at + 1] == "skyrl_fast.rollout.engine.serve_guard.EngineGuard"


def test_server_with_another_key_is_an_error_at_once() -> None:
    transport = httpx.MockTransport(lambda request: httpx.Response(401))

    async def go() -> None:
        async with RemoteEngine("http://there:1", api_key=KEY, transport=transport):
            pass

    with pytest.raises(EngineDeadError, match="refuses requests: it has another key: give") as got:
        asyncio.run(go())
    assert KEY not in str(got.value)
