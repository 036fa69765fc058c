"""Teachers: scores by servers and engines, checks at the start, and one that is lost."""

import asyncio
import json
import logging
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from _fakes import tiny_model
from _teachers import ModelEngine

from skyrl_fast.config import Config, as_config
from skyrl_fast.rollout.engine.prompt_scores import PromptScores, read_prompt_scores
from skyrl_fast.rollout.engine.protocol import EngineDeadError, EngineError, RefusedRequestError
from skyrl_fast.rollout.engine.remote import RemoteEngine
from skyrl_fast.rollout.teachers import (
    PROBE_TEXT,
    Teacher,
    TeacherError,
    TeacherLimits,
    Teachers,
    check_teachers,
    start_teachers,
)

SETTING = "trainer.algorithm.distillation.teachers.default"
URL = "http://there:1"
CONNECT = RemoteEngine.__init__


class Tokenizer:
    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        return [4 + len(word) for word in text.split()]


class Server:
    """Answers like a `vllm serve` of a teacher.

    Attributes:
        scored: the requests for completions.
        refuses: text of a refusal of these.
    """

    def __init__(self, *, max_model_len: int | None = 4096) -> None:
        self.scored: list[dict[str, Any]] = []
        self.refuses: str | None = None
        self.has_logprobs = True
        self.tokenizes = True
        self.shift = 0
        self.max_model_len = max_model_len

    def __call__(self, request: httpx.Request) -> httpx.Response:
        path = request.url.path
        body = json.loads(request.content) if request.content else {}
        if path == "/v1/models":
            model = {"id": "teacher", "max_model_len": self.max_model_len}
            return httpx.Response(200, json={"data": [model]})
        if path == "/tokenize" and self.tokenizes:
            ids = Tokenizer().encode(body["prompt"], add_special_tokens=body["add_special_tokens"])
            return httpx.Response(200, json={"tokens": [one + self.shift for one in ids]})
        if path == "/v1/completions":
            self.scored.append(body)
            if self.refuses is not None:
                return httpx.Response(400, text=self.refuses)
            return httpx.Response(200, json={"choices": [self.choice(body)]})
        return httpx.Response(200 if path == "/health" else 404)

    def choice(self, body: dict[str, Any]) -> dict[str, Any]:
        entries: list[Any] = [None]
        for token in body["prompt"][1:]:
            likely = {
                str(one): {"logprob": -one / 4} for one in range(1, body["prompt_logprobs"] + 1)
            }
            entries.append({str(token): {"logprob": -token / 8}} | likely)
        return {"prompt_logprobs": entries if self.has_logprobs else None}


def config_of(**settings: Any) -> Config:
    teachers = {"trainer.algorithm.distillation.teachers": {"default": URL}}
    return as_config(teachers | settings)


async def started(server: Server, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> Teachers:
    def through_server(engine: RemoteEngine, url: str, **options: Any) -> None:
        CONNECT(engine, url, transport=httpx.MockTransport(server), **options)

    monkeypatch.setattr(RemoteEngine, "__init__", through_server)
    teachers = await start_teachers(config_of(**settings), Tokenizer(), say=lambda line: None)
    assert teachers is not None
    return teachers


# --- servers ------------------------------------------------------------------------------------


@pytest.mark.spec("distill.server-checks")
async def test_a_server_scores_the_given_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server()
    teachers = await started(server, monkeypatch)
    probe = Tokenizer().encode(PROBE_TEXT, add_special_tokens=False)
    assert [body["prompt"] for body in server.scored] == [probe]
    teacher = teachers.of("anything")
    assert teacher is not None
    scores = await teacher.score([3, 2, 6])
    assert scores.logprobs.tolist() == [-0.25, -0.75]
    assert scores.top_ids.shape == (2, 0)
    assert server.scored[-1]["prompt"] == [3, 2, 6]
    assert server.scored[-1]["temperature"] == 0.0
    await teachers.close()


@pytest.mark.spec("distill.server-checks")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"shift": 1}, r"the policy's tokenizer, which encodes 'The teacher reads"),
        ({"has_logprobs": False}, r"expected prompt_logprobs, got none: only vLLM's servers"),
        ({"max_model_len": 1536}, r"at least 1537, for rows of up to 1536 tokens .*, got 1536 of"),
        ({"refuses": "logprobs of 0 is too many"}, r"answered 400 .* logprobs of 0 is too many"),
    ],
)
async def test_a_server_that_is_no_teacher_of_the_policy_is_refused_at_the_start(
    monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], message: str
) -> None:
    server = Server()
    for name, value in change.items():
        setattr(server, name, value)
    with pytest.raises(TeacherError, match=f"^{SETTING}: .*{message}"):
        await started(server, monkeypatch)


async def test_a_server_returns_the_likely_tokens_of_each_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = Server()
    top_k = {"trainer.algorithm.distillation.top_k": 2}
    teachers = await started(server, monkeypatch, **top_k)
    teacher = teachers.of(None)
    assert teacher is not None
    scores = await teacher.score([3, 9, 1])
    assert scores.logprobs.tolist() == [-1.125, -0.25]
    assert scores.top_ids.tolist() == [[1, 2], [1, 2]]  # without the 9, which is not likely
    assert scores.top_logprobs.tolist() == [[-0.25, -0.5], [-0.25, -0.5]]
    assert server.scored[-1]["prompt_logprobs"] == 2
    await teachers.close()
    server.refuses = "Requested prompt logprobs of 2, which is greater than max allowed: 1"
    with pytest.raises(TeacherError, match=r"max allowed.*; start it with --max-logprobs 2 or"):
        await started(server, monkeypatch, **top_k)


async def test_a_server_that_does_not_tokenize_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    server = Server(max_model_len=None)
    server.tokenizes = False
    teachers = await started(server, monkeypatch)
    await teachers.close()
    assert "the server http://there:1 does not tokenize" in caplog.text


async def test_the_key_of_a_server_is_that_of_its_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    keys = []

    class Guarded(Server):
        def __call__(self, request: httpx.Request) -> httpx.Response:
            keys.append(request.headers.get("authorization"))
            return super().__call__(request)

    file = tmp_path / "key"
    file.write_text("a-key-of-a-teacher\n")
    file.chmod(0o600)
    key_file = {"trainer.algorithm.distillation.api_key_file": str(file)}
    await (await started(Guarded(), monkeypatch, **key_file)).close()
    assert set(keys) == {"Bearer a-key-of-a-teacher"}
    keys.clear()
    await (await started(Guarded(), monkeypatch)).close()
    assert set(keys) == {None}  # the run's own key is for its own engines


@pytest.mark.parametrize(
    "entries",
    [
        [{3: -0.5}],
        [{2: -0.5}, {4: -0.5}],
        [{2: -0.5}, {3: float("nan")}],
        [{2: -0.5}, {3: float("-inf")}],
        [{2: 0.5}, {3: -0.5}],
    ],
)
def test_scores_that_do_not_fit_the_tokens_are_errors(entries: list[dict[int, float]]) -> None:
    with pytest.raises((ValueError, KeyError)):
        read_prompt_scores([1, 2, 3], entries)


# --- models that the run starts -----------------------------------------------------------------


@pytest.mark.spec("distill.model-checks")
def test_a_model_with_too_few_positions_is_refused(tmp_path: Path) -> None:
    tiny_model().save_pretrained(tmp_path / "teacher")  # 64 positions
    settings = {
        "trainer.algorithm.distillation.teachers": {"math": str(tmp_path / "teacher")},
        "generator.max_input_length": 40,
        "generator.sampling_params.max_generate_length": 23,
    }
    check_teachers(as_config(settings))
    settings["generator.sampling_params.max_generate_length"] = 24
    message = (
        r"^trainer\.algorithm\.distillation\.teachers\.math: expected a teacher with "
        r"max_position_embeddings of at least 65, for rows of up to 64 tokens"
    )
    with pytest.raises(ValueError, match=message):
        check_teachers(as_config(settings))


@pytest.mark.vllm
async def test_scores_of_vllm_are_those_of_the_model_also_after_it_was_lost(
    tiny_model_folder: Path, tiny_tokenizer: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from transformers import AutoModelForCausalLM

    from examples.asynchronous.soak import children, command_of

    settings = {
        "trainer.algorithm.distillation.teachers": {"default": str(tiny_model_folder)},
        "trainer.algorithm.distillation.top_k": 5,
        "trainer.run_path": str(tmp_path),
        "generator.max_input_length": 64,
        "generator.sampling_params.max_generate_length": 32,
    }
    before = set(children(os.getpid()))
    teachers = await start_teachers(as_config(settings), tiny_tokenizer)
    assert teachers is not None
    teacher = teachers.of(None)
    assert teacher is not None
    model = AutoModelForCausalLM.from_pretrained(tiny_model_folder).double()
    generator = torch.Generator().manual_seed(1)
    sequences = torch.randint(200, (3, 96), generator=generator)
    with torch.no_grad():
        expected = model(input_ids=sequences).logits[:, :-1].log_softmax(-1)
    wanted = expected.gather(2, sequences[:, 1:, None])[..., 0].numpy()
    try:
        for is_lost in (False, True):
            if is_lost:
                for child in set(children(os.getpid())) - before:
                    if "resource_tracker" not in command_of(child):
                        os.kill(child, signal.SIGKILL)
            scores = await asyncio.gather(*map(teacher.score, sequences.tolist()))
            for one, other in zip(scores, wanted, strict=True):
                # float32 of vLLM; its kernels sum in another order.
                assert np.abs(one.logprobs - other).max() < 1e-5
            tops = torch.from_numpy(np.stack([one.top_logprobs for one in scores]))
            ids = torch.from_numpy(np.stack([one.top_ids for one in scores])).long()
            assert (tops - expected.topk(5).values).abs().max() < 1e-5
            assert (expected.gather(2, ids) - tops).abs().max() < 1e-5
    finally:
        await teachers.close()
    assert teachers.faults()["faults/teacher_restarts"] == 1
    assert "TEACHER LOST" in caplog.text


# --- lost and back ------------------------------------------------------------------------------


class Unsteady(ModelEngine):
    """Raises these errors, one for each request, before it scores; None: it scores.

    Attributes:
        failing_starts: restarts that fail.
    """

    def __init__(self, errors: Sequence[Exception | None], *, failing_starts: int = 0) -> None:
        super().__init__(tiny_model())
        self.errors = list(errors)
        self.failing_starts = failing_starts

    async def restart(self) -> None:
        if self.failing_starts:
            self.failing_starts -= 1
            raise EngineDeadError("did not start")
        await super().restart()

    async def score_prompt(self, token_ids: Sequence[int], *, top_k: int = 0) -> PromptScores:
        error = self.errors.pop(0) if self.errors else None
        await asyncio.sleep(0)  # all requests are sent before the first fails
        if error is not None:
            raise error
        return await super().score_prompt(token_ids, top_k=top_k)


def unsteady(*errors: Exception | None, **options: Any) -> tuple[Teacher, Unsteady]:
    engine: Any = Unsteady(errors, **options)
    return Teacher(SETTING, engine, max_length=9, limits=TeacherLimits(max_restarts=2)), engine


@pytest.mark.spec("distill.lost")
async def test_sequences_of_a_lost_teacher_are_scored_again_by_one_restart(
    caplog: pytest.LogCaptureFixture,
) -> None:
    lost = EngineDeadError("its process is gone")
    teacher, engine = unsteady(None, lost, lost, lost)
    await teacher.start()
    sequences = [[1, 2, 3 + number] for number in range(4)]
    with caplog.at_level(logging.WARNING):
        scores = await asyncio.gather(*map(teacher.score, sequences))
    assert sorted(engine.scored) == sequences
    assert engine.starts == 2
    assert teacher.faults == {"teacher_restarts": 1, "teacher_requests_sent_again": 3}
    assert f"TEACHER LOST: {SETTING}: its process is gone; restart 1 of 2" in caplog.text
    again = await asyncio.gather(*map(teacher.score, sequences))
    for one, other in zip(scores, again, strict=True):
        assert np.array_equal(one.logprobs, other.logprobs)


async def test_a_teacher_that_does_not_come_back_ends_the_run_by_its_name() -> None:
    teacher, _ = unsteady(EngineDeadError("gone"), failing_starts=2)
    await teacher.start()
    message = (
        f"^{SETTING}: the teacher is lost, and 2 restarts did not bring it back: did not start"
    )
    with pytest.raises(EngineDeadError, match=message):
        await teacher.score([1, 2])


async def test_restarts_count_from_the_last_answer() -> None:
    lost = EngineDeadError("gone")
    teacher, engine = unsteady(lost, lost, None, lost, lost, None)
    await teacher.start()
    await teacher.score([1, 2])
    await teacher.score([1, 2])
    assert engine.starts == 5


async def test_a_teacher_that_hangs_is_lost() -> None:
    class Hanging(Unsteady):
        async def score_prompt(self, token_ids: Sequence[int], *, top_k: int = 0) -> PromptScores:
            if self.starts == 1:
                await asyncio.Event().wait()
            return await super().score_prompt(token_ids)

    engine: Any = Hanging(())
    teacher = Teacher(SETTING, engine, limits=TeacherLimits(seconds=0.05))
    await teacher.start()
    assert len((await teacher.score([1, 2, 3])).logprobs) == 2
    assert engine.starts == 2


async def test_an_answer_that_fails_is_asked_for_three_times() -> None:
    teacher, engine = unsteady(EngineError("odd"), EngineError("odd"))
    await teacher.score([1, 2])
    assert engine.scored == [[1, 2]]
    engine.errors = [EngineError("odd")] * 3
    with pytest.raises(TeacherError, match=f"^{SETTING}: odd"):
        await teacher.score([1, 2])


async def test_a_sequence_that_a_teacher_cannot_read_is_an_error() -> None:
    teacher, engine = unsteady(RefusedRequestError("token 99 is unknown"))
    with pytest.raises(TeacherError, match=f"^{SETTING}: token 99 is unknown"):
        await teacher.score([1, 99])
    with pytest.raises(TeacherError, match=r"rows of at most 9 tokens, .*, got one of 10"):
        await teacher.score([1] * 10)
    assert engine.scored == []
