"""The vLLM engine: clear refusals without vLLM, and real generation with it."""

import asyncio
import json
import os
import signal
import tempfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from _listening import LOOPBACK, listening
from _weights import file_call, update_engine

from examples.asynchronous.soak import children
from skyrl_fast.config import InferenceEngineConfig, SamplingParams
from skyrl_fast.rollout.engine.protocol import EngineDeadError, EngineError, Generation
from skyrl_fast.rollout.engine.vllm_engine import Vllm, VllmEngine, check_installed
from skyrl_fast.rollout.engine.vllm_start import (
    LARGE_MODEL_BYTES,
    MainModule,
    VllmSetup,
    check_can_spawn,
    engine_environment,
    environment,
)
from skyrl_fast.rollout.engine.weights.probe import WeightProbe
from skyrl_fast.rollout.engine.weights.receipt import WeightSyncError


def start(config: VllmSetup) -> None:
    asyncio.run(VllmEngine(config).start())


def test_missing_vllm_error_says_what_to_install() -> None:
    with pytest.raises(EngineDeadError, match=r"pip install '\.\[vllm\]'"):
        check_installed("no_such_package")


@pytest.mark.vllm
def test_missing_model_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(EngineDeadError, match=r"model folder not found.*nothing-here"):
        start(VllmSetup(str(tmp_path / "nothing-here")))
    with pytest.raises(EngineDeadError, match=r"has no config\.json"):
        start(VllmSetup(str(tmp_path)))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(EngineDeadError, match=r"has no \*\.safetensors"):
        start(VllmSetup(str(tmp_path)))


def test_start_during_main_import_error_asks_for_a_main_guard() -> None:
    with pytest.raises(EngineDeadError, match="__main__"):
        check_can_spawn(MainModule(None, is_imported_by_child=True))


def test_main_module_that_is_not_a_file_is_refused() -> None:
    with pytest.raises(EngineDeadError, match="is no file"):
        check_can_spawn(MainModule("/nowhere/<stdin>"))
    check_can_spawn(MainModule(None))
    check_can_spawn(MainModule(__file__))


def test_request_to_an_unstarted_engine_is_an_error() -> None:
    async def ask() -> None:
        await VllmEngine(VllmSetup("anything")).generate(
            [1], SamplingParams(), session_id="a", policy_version=0
        )

    with pytest.raises(EngineDeadError, match="not running"):
        asyncio.run(ask())


def test_restarted_engine_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    config = VllmSetup("anything", log_file=str(tmp_path / "run/engine.log"))
    first, second = engine_environment(config), engine_environment(config)
    assert first == second
    assert Path(first["VLLM_LOGGING_CONFIG_PATH"]).parent == tmp_path / "run"
    written = json.loads(Path(first["VLLM_LOGGING_CONFIG_PATH"]).read_text())
    assert written["handlers"]["file"]["filename"] == config.log_file
    assert list(temporary.iterdir()) == []


@pytest.mark.spec("async.engine-threads")
def test_engine_of_a_large_model_has_all_cores_while_nothing_is_trained(tmp_path: Path) -> None:
    def threads(setup: VllmSetup, num_cores: int = 4) -> str:
        return engine_environment(setup, num_cores=num_cores)["OMP_NUM_THREADS"]

    model = VllmSetup(str(tmp_path), on_cpu=True)
    with (tmp_path / "model-00001-of-00001.safetensors").open("wb") as file:
        for size, wanted in ((LARGE_MODEL_BYTES - 1, "3"), (LARGE_MODEL_BYTES, "4")):
            file.truncate(size)
            assert threads(replace(model, takes_turns=True)) == wanted
            assert threads(model) == "3"
    chosen = replace(model, engine=InferenceEngineConfig(num_threads=2), takes_turns=True)
    assert threads(chosen) == "2"
    assert threads(model, 1) == threads(replace(model, takes_turns=True), 1) == "1"


class FakeLlm:
    """The request methods of vLLM's AsyncLLM; records its requests."""

    errored = False

    def __init__(self) -> None:
        self.asked: list[tuple[dict[str, Any], str]] = []
        self.tokens = [7]
        self.logprob = -0.5

    async def generate(
        self, prompt: dict[str, Any], params: Any, request_id: str, **kw: Any
    ) -> Any:
        self.asked.append((prompt, kw["session_id"]))
        number = len(self.tokens)
        logprobs = SimpleNamespace(  # FlatLogprobs
            token_ids=[7] * number,
            logprobs=[self.logprob] * number,
            start_indices=list(range(number)),
            end_indices=list(range(1, number + 1)),
        )
        answer = SimpleNamespace(
            token_ids=self.tokens, logprobs=logprobs, finish_reason="stop", stop_reason="</a>"
        )
        yield SimpleNamespace(outputs=[answer])


def running(llm: Any, sampling_params: Any = None) -> Vllm:
    """Return vLLM's parts without vLLM."""
    return Vllm(llm, sampling_params, dict, "final", (TypeError, ValueError), KeyError)


def fake_engine(llm: FakeLlm, sampling_params: Any) -> VllmEngine:
    return VllmEngine(VllmSetup("anything"), running=running(llm, sampling_params))


@pytest.mark.spec("async.engine-silence")
async def test_a_process_that_dies_at_the_start_is_noticed() -> None:
    class Dead(FakeLlm):
        model_config = SimpleNamespace(get_vocab_size=lambda: 10)
        errored = True

        async def collective_rpc(self, *_: Any) -> None:
            await asyncio.Event().wait()

    engine = VllmEngine(VllmSetup("anything"), start=lambda setup: running(Dead()))
    async with asyncio.timeout(20):
        with pytest.raises(EngineDeadError, match=r"vLLM engine for anything did not start"):
            await engine.start()


@pytest.mark.parametrize(
    ("script", "is_named"),
    [("train()\n", True), ('if __name__ == "__main__":\n    train()\n', False)],
)
async def test_a_script_without_a_guard_is_named_in_the_last_line(
    script: str, is_named: bool, tmp_path: Path
) -> None:
    def fail(setup: VllmSetup) -> Vllm:
        raise RuntimeError("Engine core initialization failed")

    (tmp_path / "script.py").write_text(script)
    (tmp_path / "vllm.log").write_text("INFO the last line of the log\n")
    main = MainModule(str(tmp_path / "script.py"))
    setup = VllmSetup("anything", log_file=str(tmp_path / "vllm.log"))
    engine = VllmEngine(setup, start=fail, main=main)
    with pytest.raises(EngineDeadError) as caught:
        await engine.start()
    last = str(caught.value).splitlines()[-1]
    assert ("script.py starts it without a guard" in last) is is_named
    assert is_named or "INFO the last line" in last


@pytest.mark.spec("rollout.one-sample", "rollout.cache-salt")
async def test_requests_have_a_session_and_a_cache_salt_per_version() -> None:
    wanted: list[dict[str, Any]] = []
    llm = FakeLlm()
    engine = fake_engine(llm, lambda **kw: wanted.append(kw))

    sampling = SamplingParams(stop=["</a>"], temperature=0.5)
    for session_id, version in (("a", 3), ("b", 3), ("a", 4)):
        got = await engine.generate(
            [1, 2], sampling, session_id=session_id, policy_version=version, seed=5
        )
        assert (got.token_ids, got.logprobs, got.stop_string) == ([7], [-0.5], "</a>")
    assert [session for _, session in llm.asked] == ["a", "b", "a"]
    salts = [prompt["cache_salt"] for prompt, _ in llm.asked]
    assert salts[0] == salts[1] != salts[2]
    assert all(w["stop"] == ["</a>"] and w["include_stop_str_in_output"] for w in wanted)
    assert [(w["seed"], w["temperature"], w["logprobs"]) for w in wanted] == [(5, 0.5, 0)] * 3


@pytest.mark.spec("rollout.engine-error")
def test_additional_sampling_parameters_take_precedence_and_invalid_ones_fail_the_request() -> None:
    wanted: list[dict[str, Any]] = []

    def params(**kw: Any) -> None:
        if "nonsense" in kw:
            raise TypeError("Unexpected keyword argument 'nonsense'")
        wanted.append(kw)

    engine = fake_engine(FakeLlm(), params)

    async def ask(extra: dict[str, Any]) -> None:
        sampling = SamplingParams(stop=["</a>"], additional_kwargs=extra)
        await engine.generate([1, 2], sampling, session_id="a", policy_version=0)

    asyncio.run(ask({"stop_token_ids": [5], "ignore_eos": True}))
    assert (wanted[0]["stop_token_ids"], wanted[0]["ignore_eos"]) == ([5], True)
    with pytest.raises(EngineError, match=r"sampling parameters: Unexpected .* 'nonsense'"):
        asyncio.run(ask({"nonsense": 1}))


@pytest.mark.spec("async.server-answers")
@pytest.mark.parametrize(
    ("tokens", "logprob", "wanted"),
    [
        ([7], float("nan"), "logprob 0: expected a number from -9000 to 0, got nan"),
        ([7], float("-inf"), "logprob 0: expected a number from -9000 to 0, got -inf"),
        ([7], -9999.0, "logprob 0: expected a number from -9000 to 0, got -9999.0"),
        ([7], -1e30, "logprob 0: expected a number from -9000 to 0, got -1e\\+30"),
        ([7], 3.0, "logprob 0: expected a number from -9000 to 0, got 3.0"),
        ([7] * 3, -0.5, "expected at most 2 tokens, got 3"),
        (
            [8],
            -0.5,
            "another format than vLLM: ValueError: expected logprobs of the 1 sampled tokens",
        ),
    ],
)
def test_answers_of_the_local_engine_are_checked(
    tokens: list[int], logprob: float, wanted: str
) -> None:
    llm = FakeLlm()
    llm.tokens = tokens
    llm.logprob = logprob
    engine = fake_engine(llm, lambda **kw: None)
    sampling = SamplingParams(max_generate_length=2, stop=["</a>"])
    with pytest.raises(EngineError, match=wanted):
        asyncio.run(engine.generate([1], sampling, session_id="a", policy_version=0))


@pytest.mark.spec("async.engine-silence")
@pytest.mark.parametrize("call", ["interrupt", "load_weights", "reset_prefix_cache"])
def test_call_ends_if_a_killed_engine_never_answers(call: str, tmp_path: Path) -> None:
    """vLLM fails the requests of an engine that died, and leaves other calls without answer."""

    class Killed:
        errored = False

        async def never(self, *arguments: Any, **options: Any) -> None:
            self.errored = True  # during the call
            await asyncio.Event().wait()

        pause_generation = collective_rpc = reset_prefix_cache = never

    setup = VllmSetup("anything")
    engine = VllmEngine(setup, running=running(Killed()), poll_seconds=0.01)
    arguments = [file_call(tmp_path)] if call == "load_weights" else []
    with pytest.raises(EngineDeadError, match="the vLLM engine for anything"):
        asyncio.run(asyncio.wait_for(getattr(engine, call)(*arguments), 5))


def test_environment_variables_are_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SET_BY_USER", "1")
    monkeypatch.delenv("SET_BY_US", raising=False)
    with environment({"SET_BY_USER": "2", "SET_BY_US": "3"}):
        assert (os.environ["SET_BY_USER"], os.environ["SET_BY_US"]) == ("1", "3")
        os.environ["SET_BY_VLLM"] = "4"
    assert "SET_BY_US" not in os.environ
    assert "SET_BY_VLLM" not in os.environ


# --- real vLLM: a single engine start ------------------------------------------------------------


def hf_logprobs(model: torch.nn.Module, sequences: list[list[int]]) -> list[list[float]]:
    rows = []
    with torch.no_grad():
        for sequence in sequences:
            ids = torch.tensor([sequence])
            logprobs = model(ids).logits[0, :-1].float().log_softmax(-1)
            rows.append(logprobs.gather(1, ids[0, 1:, None])[:, 0].tolist())
    return rows


@pytest.mark.spec("run.engine-network")
@pytest.mark.vllm
@pytest.mark.timeout(900)  # two cores that others use too; alone it takes well under a minute
def test_real_vllm_generates_updates_and_detects_stale_weights(
    tiny_model_folder: Path, tiny_tokenizer: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Start-up dominates, so all assertions on a live engine share one."""
    with tempfile.TemporaryDirectory() as folder:  # short: a socket's path has at most 107 bytes
        monkeypatch.setattr("tempfile.tempdir", folder)
        asyncio.run(_drive_real_engine(tiny_model_folder, tiny_tokenizer, tmp_path))


async def _drive_real_engine(folder: Path, tokenizer, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder).float().eval()
    log_file = tmp_path / "vllm.log"
    config = VllmSetup(
        str(folder),
        InferenceEngineConfig(max_num_seqs=32),
        max_model_len=256,
        log_file=str(log_file),
    )
    already_there = children(os.getpid())  # what other tests have left running
    temporary = Path(tempfile.gettempdir())
    async with VllmEngine(config) as engine:
        prompts = [tokenizer.encode(f"question {i}, " * (1 + i % 5)) for i in range(12)]
        first = await _sample(engine, prompts)
        await _agrees_with_hugging_face(model, prompts, first)
        await _is_reproducible(engine, prompts, first)
        await _stops_where_told(engine, tokenizer)
        await _reports_its_prefix_cache(engine)
        await _updates_are_verified(engine, model, prompts)
        with pytest.raises(EngineError, match="refused"):
            await engine.generate([1] * 300, SamplingParams(), session_id="a", policy_version=0)
        started = [pid for pid in children(os.getpid()) if pid not in already_there]
        _interrupts_do_not_reach(started)
        for pid in (os.getpid(), *started):
            assert listening(pid) <= {LOOPBACK}
        assert any(path.is_socket() for path in temporary.rglob("*"))
    assert not any(path.is_socket() for path in temporary.rglob("*"))
    assert "vllm" in log_file.read_text().lower()
    await engine.close()  # a second call does nothing


async def _sample(engine: VllmEngine, prompts: list[list[int]], *, version: int = 0) -> list:
    return await asyncio.gather(
        *[
            engine.generate(
                prompt,
                SamplingParams(max_generate_length=24, temperature=0.7),
                session_id=f"s{i}",
                policy_version=version,
                seed=100 + i,
            )
            for i, prompt in enumerate(prompts)
        ]
    )


async def _agrees_with_hugging_face(model, prompts, generations) -> None:
    for prompt, generation in zip(prompts, generations, strict=True):
        ids = torch.tensor([prompt + generation.token_ids])
        with torch.no_grad():
            logits = model(ids).logits[0, len(prompt) - 1 : -1] / 0.7
        wanted = logits.log_softmax(-1).gather(1, ids[0, len(prompt) :, None])[:, 0]
        # float32 on both sides; other kernels, other order of sums.
        torch.testing.assert_close(torch.tensor(generation.logprobs), wanted, atol=1e-4, rtol=0)
        assert len(generation.token_ids) == len(generation.logprobs) <= 24


async def _is_reproducible(engine: VllmEngine, prompts, first) -> None:
    """The same seeds give the same tokens and logprobs, whatever runs concurrently.

    But for rounding: with several threads vLLM's sums depend on what it happens to serve together.
    """
    for again, before in zip(await _sample(engine, prompts, version=1), first, strict=True):
        _are_the_same(again, before)
    alone = await engine.generate(
        prompts[3],
        SamplingParams(max_generate_length=24, temperature=0.7),
        session_id="alone",
        policy_version=2,
        seed=103,
    )
    _are_the_same(alone, first[3])


def _are_the_same(one: Generation, two: Generation) -> None:
    assert one.token_ids == two.token_ids
    assert one.logprobs == pytest.approx(two.logprobs, abs=1e-5)
    assert (one.stop_reason, one.stop_string) == (two.stop_reason, two.stop_string)


async def _reports_its_prefix_cache(engine: VllmEngine) -> None:
    """A turn finds the blocks of the turn before it, in its version only."""
    history = [7 + i % 40 for i in range(70)]  # two blocks and a part
    found = []
    for prompt, version in ((history, 5), ([*history, 3, 4], 5), (history, 6)):
        (answer,) = await _sample(engine, [prompt], version=version)
        found.append(answer.num_cached_tokens)
    assert found == [0, 64, 0]
    # The samples of a prompt, requested at the same time, share its blocks.
    samples = await _sample(engine, [history, history, history], version=7)
    assert [answer.num_cached_tokens for answer in samples] == [0, 64, 64]


async def _stops_where_told(engine: VllmEngine, tokenizer) -> None:
    prompt = tokenizer.encode("stop test")
    free = await engine.generate(
        prompt, SamplingParams(max_generate_length=30), session_id="f", policy_version=0, seed=5
    )
    text = tokenizer.decode(free.token_ids)
    printable = next(c for c in text if c.isascii() and c.isprintable())
    stopped = await engine.generate(
        prompt,
        SamplingParams(max_generate_length=30, stop=[printable]),
        session_id="g",
        policy_version=0,
        seed=5,
    )
    assert (stopped.stop_reason, stopped.stop_string) == ("stop", printable)
    assert tokenizer.decode(stopped.token_ids).index(printable) >= 0
    assert stopped.token_ids == free.token_ids[: len(stopped.token_ids)]
    by_id = await engine.generate(
        prompt,
        SamplingParams(
            max_generate_length=30, additional_kwargs={"stop_token_ids": [free.token_ids[2]]}
        ),
        session_id="h",
        policy_version=0,
        seed=5,
    )
    assert by_id.stop_string is None
    assert by_id.token_ids[-1] == free.token_ids[2]


async def _updates_are_verified(engine: VllmEngine, model, prompts) -> None:
    probe = WeightProbe(
        engine,
        probe=[p[:24] for p in prompts[:3]],
        trainer_logprobs=lambda probe: [(row, 1.0) for row in hf_logprobs(model, probe)],
    )
    report = await probe.verify()
    assert report.difference.maximum < 1e-4
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    with pytest.raises(WeightSyncError, match="differ from the trainer's"):
        await probe.verify()  # stale on purpose: the policy changed, the engine was not updated
    running = asyncio.create_task(_sample(engine, prompts, version=5))
    await asyncio.sleep(0.02)
    report = await update_engine(engine, probe, model.state_dict())
    assert report.difference.maximum < 1e-4 < report.max_change
    assert len(await running) == len(prompts)  # requests in flight continued
    await _agrees_with_hugging_face(model, prompts, await _sample(engine, prompts, version=6))
    incomplete = dict(model.named_parameters())
    del incomplete["model.layers.0.mlp.down_proj.weight"]
    with pytest.raises(WeightSyncError, match=r"got no new values.*down_proj"):
        await update_engine(engine, probe, incomplete)
    await update_engine(engine, probe, model.state_dict())


def _interrupts_do_not_reach(pids: list[int]) -> None:
    """Ctrl-C stops the trainer gracefully; it must not kill the engine's processes."""
    bit = 1 << (signal.SIGINT - 1)
    hearing = []
    for pid in pids:
        status = dict(
            line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines()
        )
        if not any(int(status[mask], 16) & bit for mask in ("SigBlk", "SigIgn")):
            hearing.append(Path(f"/proc/{pid}/cmdline").read_text().split("\0"))
    assert pids  # the engine core; the resource tracker may be that of another test
    assert not hearing
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, set())
