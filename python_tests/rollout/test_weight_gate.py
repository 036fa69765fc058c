"""Requests during weight updates: the version of every token, and no lost tokens."""

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from fake_envs import FakePrompt, loop_config, register_fakes
from hypothesis import given
from hypothesis import strategies as st

from skyrl_fast.config import EnvironmentConfig, SamplingParams
from skyrl_fast.rollout.continued import generate_through_updates
from skyrl_fast.rollout.engine.protocol import EngineError, Generation
from skyrl_fast.rollout.engine.weights.gate import WeightGate
from skyrl_fast.rollout.env.factory import EnvFactory
from skyrl_fast.rollout.groups import environment_runner, run_groups
from skyrl_fast.rollout.policy_calls import PolicyCalls
from skyrl_fast.rollout.stop_reason import INTERRUPTED

register_fakes()


class Parts:
    """Returns a fixed response in parts of the given sizes, each with the engine's current version.

    The logprob of a token is minus its version.
    """

    def __init__(self, gate: WeightGate, response: Sequence[int], sizes: Sequence[int]) -> None:
        self.gate = gate
        self.response = list(response)
        self.sizes = list(sizes)
        self.asked: list[tuple[list[int], SamplingParams, int | None]] = []

    async def generate(
        self,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        session_id: str,
        policy_version: int,
        seed: int | None = None,
        expert_indices_start: int = 0,
        policy: str | None = None,
    ) -> Generation:
        self.asked.append((list(prompt_token_ids), sampling, seed))
        done = len(prompt_token_ids) - 2
        left = self.response[done:]
        if not self.sizes:
            routes = np.arange(len(prompt_token_ids) + len(left) - 1).reshape(-1, 1, 1)
            return Generation(
                left, [-float(policy_version)] * len(left), "stop", None,
                routes + 100 * policy_version,
            )  # fmt: skip
        size = min(self.sizes.pop(0), len(left))
        self.gate.version += 1
        part = left[:size]
        routes = np.arange(len(prompt_token_ids) + size - 1).reshape(-1, 1, 1)
        return Generation(
            part, [-float(policy_version)] * size, INTERRUPTED, None, routes + 100 * policy_version
        )


def through(
    tokenizer: Any,
    response: Sequence[int],
    sizes: Sequence[int],
    stop: Sequence[str] = (),
    **additional: Any,
) -> tuple[Parts, Generation]:
    async def go() -> tuple[Parts, Generation]:
        gate = WeightGate(7)
        parts = Parts(gate, response, sizes)
        got = await generate_through_updates(
            parts, gate, tokenizer, [1, 2],
            SamplingParams(
                max_generate_length=len(response), stop=list(stop), additional_kwargs=additional
            ),
            session_id="s", part_seed=lambda part: 1000 + part,
        )  # fmt: skip
        return parts, got

    return asyncio.run(go())


@pytest.mark.spec("async.token-versions")
def test_tokens_are_kept_with_their_version(tiny_tokenizer: Any) -> None:
    parts, got = through(tiny_tokenizer, [10, 11, 12, 13, 14], [2, 0, 1])
    assert got.token_ids == [10, 11, 12, 13, 14]
    assert got.versions == [7, 7, 9, 10, 10]
    assert got.logprobs == [-7.0, -7.0, -9.0, -10.0, -10.0]
    assert got.stop_reason == "stop"
    assert [ids for ids, _, _ in parts.asked] == [
        [1, 2], [1, 2, 10, 11], [1, 2, 10, 11], [1, 2, 10, 11, 12],
    ]  # fmt: skip
    assert [s.max_generate_length for _, s, _ in parts.asked] == [5, 3, 3, 2]
    assert [seed for _, _, seed in parts.asked] == [1000, 1001, 1002, 1003]


@pytest.mark.spec("async.structured")
def test_an_answer_under_a_grammar_begins_again(tiny_tokenizer: Any) -> None:
    """The engine's grammar begins with each request."""
    form = {"json_object": True}
    parts, got = through(tiny_tokenizer, [10, 11, 12, 13], [3, 1], structured_outputs=form)
    assert got.token_ids == [10, 11, 12, 13]
    assert got.versions == [9] * 4
    assert [ids for ids, _, _ in parts.asked] == [[1, 2]] * 3
    assert [s.max_generate_length for _, s, _ in parts.asked] == [4] * 3


def test_recorded_routes_are_kept(tiny_tokenizer: Any) -> None:
    _, got = through(tiny_tokenizer, [10, 11, 12], [2])
    routes = got.expert_indices
    assert routes is not None
    # Prompt and two tokens under version 7: three routes; the rest under version 8.
    assert routes[:, 0, 0].tolist() == [700, 701, 702, 803]


def test_interruption_at_the_last_token_leaves_room_for_an_end_token(tiny_tokenizer: Any) -> None:
    parts, got = through(tiny_tokenizer, [10, 11, 12], [3])
    assert got.token_ids == [10, 11, 12]
    assert got.versions == [7, 7, 8]
    assert parts.asked[1][1].max_generate_length == 1


@pytest.mark.spec("async.stop-strings")
@pytest.mark.parametrize(
    ("text", "kept"),
    [("ab</so", "ab"), ("ab<", "ab"), ("ab</x", "ab</x"), ("ab", "ab"), ("</solutio", "")],
)
def test_a_partial_stop_string_is_sampled_again(tiny_tokenizer: Any, text: str, kept: str) -> None:
    response = tiny_tokenizer.encode(text + "zzzzzzzzzzzzz")
    part = len(tiny_tokenizer.encode(text))
    parts, got = through(tiny_tokenizer, response, [part], stop=("</solution>", "</sql>"))
    asked_again = parts.asked[1][0][2:]
    assert tiny_tokenizer.decode(asked_again) == kept
    assert got.token_ids == response
    assert got.versions == [7] * len(asked_again) + [8] * (len(response) - len(asked_again))


@given(st.lists(st.integers(0, 4), max_size=6), st.integers(1, 12))
def test_any_interruptions_give_the_complete_response(sizes: list[int], length: int) -> None:
    _, got = through(None, list(range(length)), sizes)
    assert got.token_ids == list(range(length))
    assert len(got.versions) == len(got.logprobs) == length
    assert got.versions == sorted(got.versions)
    assert [-v for v in got.versions] == got.logprobs


# Tokens of which several make a stop string, a bad word or a character; the last two are an end and
# a special token, which has no text.
PIECES = [b"a", b"b<", b"<", b"/", b"</", b"/a", b"a>", b">", b"\xc3", b"\xa9", b"END", b""]
END, SPECIAL = len(PIECES) - 2, len(PIECES) - 1
INSTEAD = 0  # or 1, sampled where the script's token is excluded
FORM = {"regex": "of even and odd pieces by turns"}


class Pieces:
    """The tokenizer of PIECES."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        texts = [PIECES[i] if i != SPECIAL or skip_special_tokens else b"<s>" for i in ids]
        return b"".join(texts).decode(errors="replace")


class ScriptedModel:
    """Answers by a script, as vLLM reads limits: within one request; updates come after `cuts`."""

    def __init__(self, gate: WeightGate, script: Sequence[int], cuts: Sequence[int]) -> None:
        self.gate, self.script, self.cuts = gate, script, list(cuts)

    async def generate(
        self, prompt_token_ids: Sequence[int], sampling: SamplingParams, **_: Any
    ) -> Generation:
        more, stops = sampling.additional_kwargs, sampling.stop or []
        ends = {END, *more.get("stop_token_ids", ())}
        least, first = more.get("min_tokens", 0), len(prompt_token_ids) - 1
        assert least <= sampling.max_generate_length  # vLLM refuses other requests
        out: list[int] = []
        cut = self.cuts.pop(0) if self.cuts else None

        def answer(reason: str, stop: str | None = None) -> Generation:
            kept = [np.array([i], np.int32) for i in out] if sampling.num_kept_tokens else None
            return Generation(out, [-0.5] * len(out), reason, stop, kept_ids=kept)

        while True:
            if cut == len(out):
                self.gate.version += 1
                return answer(INTERRUPTED)
            token = self.script[first + len(out)]
            wanted = len(out) % 2 if "structured_outputs" in more else INSTEAD
            bad = any([*out, token][-len(word) :] == word for word in map(pieces_of, bad_of(more)))
            bad |= "structured_outputs" in more and token % 2 != wanted
            token = wanted if bad or (token in ends and len(out) < least) else token
            out.append(token)
            if len(out) > least:
                if token in ends:
                    return answer("stop")
                known, text = Pieces().decode(out[:-1]), Pieces().decode(out)
                beyond = max(len(known), len(Pieces().decode(out[:least])))
                for stop in stops:
                    if text.find(stop, max(0, beyond + 1 - len(stop))) >= 0:
                        return answer("stop", stop)
            if len(out) == sampling.max_generate_length:
                return answer("length")


def bad_of(more: dict[str, Any]) -> list[str]:
    return list(more.get("bad_words", ()))


def pieces_of(word: str) -> list[int]:
    return [PIECES.index(char.encode()) for char in word]


@pytest.mark.spec("async.stop-strings", "async.limits")
@given(
    script=st.lists(st.integers(0, SPECIAL), min_size=24, max_size=24),
    cuts=st.lists(st.integers(0, 5), max_size=8),
    stop=st.lists(st.sampled_from(["</a>", "b</a", "<<", "/é>", "aaaa", "</a></"]), max_size=2),
    length=st.integers(1, 24),
    least=st.integers(0, 24),
    end=st.sampled_from([[], [3], [SPECIAL]]),
    words=st.lists(st.sampled_from(["a</", "</>", ">a"]), max_size=1),
    form=st.sampled_from([None, FORM]),
)
def test_an_answer_over_updates_is_one_that_its_limits_allow_without_them(
    script: list[int], cuts: list[int], stop: list[str], length: int, least: int, end: list[int],
    words: list[str], form: dict[str, str] | None,
) -> None:  # fmt: skip
    sampling = SamplingParams(
        max_generate_length=length,
        stop=stop,
        additional_kwargs={
            "min_tokens": min(least, length),
            "stop_token_ids": end,
            "bad_words": words,
            **({} if form is None else {"structured_outputs": form}),
        },
    )

    def answer(cuts: Sequence[int]) -> Generation:
        gate = WeightGate()
        return asyncio.run(
            generate_through_updates(
                ScriptedModel(gate, script, cuts), gate, Pieces(), [1], sampling,
                session_id="s", part_seed=lambda part: part,
            )
        )  # fmt: skip

    uncut, got = answer(()), answer(cuts)
    assert got == uncut
    sets = got.kept_ids
    assert (sets is None) == (sampling.num_kept_tokens is None)
    assert sets is None or [ids.tolist() for ids in sets] == [[i] for i in got.token_ids]
    assert got.versions == sorted(got.versions)
    assert form is None or all(n % 2 == i % 2 for i, n in enumerate(got.token_ids))


@pytest.mark.spec("async.limits")
@pytest.mark.parametrize("name", ["presence_penalty", "frequency_penalty"])
def test_an_answer_with_penalties_begins_again(tiny_tokenizer: Any, name: str) -> None:
    """The engine counts the tokens of each request."""
    parts, got = through(tiny_tokenizer, [10, 11, 12], [2], **{name: 0.5})
    assert [ids for ids, _, _ in parts.asked] == [[1, 2]] * 2
    assert got.versions == [8] * 3


@pytest.mark.spec("async.verified-update")
async def test_no_request_passes_a_closed_gate_and_an_update_waits_for_those_inside() -> None:
    gate = WeightGate()
    events: list[str] = []
    inside = asyncio.Event()
    interrupted = asyncio.Event()

    async def request(name: str) -> None:
        async with gate.request() as version:
            events.append(f"{name} in at {version}")
            inside.set()
            await interrupted.wait()
            events.append(f"{name} out")

    first = asyncio.create_task(request("first"))
    await inside.wait()
    calls = 0

    async def interrupt() -> None:
        nonlocal calls
        calls += 1
        if calls == 3:  # the request has reached the engine only now
            interrupted.set()

    async with gate.hold_closed(interrupt) as number:
        assert number == 1 and gate.num_inside == 0
        late = asyncio.create_task(request("late"))
        await asyncio.sleep(0.01)
        events.append("updated")
        gate.version = 1
    await asyncio.gather(first, late)
    assert calls == 3
    assert events == ["first in at 0", "first out", "updated", "late in at 1", "late out"]


async def test_long_wait_of_an_update_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    seconds = iter(range(0, 1000, 40))
    gate = WeightGate(clock=lambda: float(next(seconds)))
    leave = asyncio.Event()

    async def request() -> None:
        async with gate.request():
            await leave.wait()

    task = asyncio.create_task(request())
    await asyncio.sleep(0)
    calls = 0

    async def interrupt() -> None:
        nonlocal calls
        calls += 1
        if calls == 4:
            leave.set()

    async with gate.hold_closed(interrupt):
        pass
    await task
    assert "a weight update waits for 1 requests" in caplog.text


def test_engine_response_beyond_the_limit_is_refused(tiny_tokenizer: Any) -> None:
    with pytest.raises(EngineError, match="no room for more"):
        through(tiny_tokenizer, [], [1])


class TwoTurns:
    """Answers turn by turn; its first requests are blocked until the test releases them."""

    def __init__(self, tokenizer: Any) -> None:
        self.ids = tokenizer.encode("abcd")
        self.let_go = asyncio.Event()
        self.interrupted = asyncio.Event()
        self.waiting = 0

    async def generate(
        self, prompt_token_ids: Sequence[int], sampling: SamplingParams, **place: Any
    ) -> Generation:
        version = place["policy_version"]
        self.waiting += 1
        done = 4 - sampling.max_generate_length
        if not self.let_go.is_set():
            stop = asyncio.ensure_future(self.interrupted.wait())
            go = asyncio.ensure_future(self.let_go.wait())
            await asyncio.wait({stop, go}, return_when=asyncio.FIRST_COMPLETED)
            for task in (stop, go):
                task.cancel()
            if not self.let_go.is_set():
                return Generation(self.ids[:2], [-float(version)] * 2, INTERRUPTED)
        left = self.ids[done:]
        return Generation(left, [-float(version)] * len(left), "length")


@pytest.mark.spec("async.pause-update")
@pytest.mark.parametrize("in_flight", [True, False])
async def test_steps_record_the_versions_of_their_tokens(
    tiny_tokenizer: Any, in_flight: bool
) -> None:
    engine = TwoTurns(tiny_tokenizer)
    gate = WeightGate(3)
    factory = EnvFactory(EnvironmentConfig())
    config = loop_config(max_turns=2, sampling_params=SamplingParams(max_generate_length=4))
    runner = environment_runner(PolicyCalls(engine, gate, tiny_tokenizer, 0), factory, config)
    work = asyncio.create_task(
        run_groups(runner, [FakePrompt("p")], phase="train", policy_version=3)
    )
    while not engine.waiting:
        await asyncio.sleep(0.001)

    async def interrupt() -> None:
        if in_flight:
            engine.interrupted.set()
        else:
            engine.let_go.set()  # the turn ends without interruption

    async with gate.hold_closed(interrupt):
        gate.version = 4
        engine.let_go.set()
    (trajectory,) = await work
    await factory.close()
    first, second = trajectory.steps
    assert first.versions == ([3, 3, 4, 4] if in_flight else [3, 3, 3, 3])
    assert second.versions == [4, 4, 4, 4]
    assert (first.policy_version, second.policy_version) == (3, 4)
    assert second.token_versions is None
    assert first.rollout_logprobs == [-float(v) for v in first.versions]
