"""One agent as an environment and at the gateway: the same rows; and the real engine agrees."""

import hashlib
from pathlib import Path
from typing import Any

import pytest
from _gateway import USER, chat, played
from fake_envs import Call, ScriptedEngine, loop_config, prompt_with, register_fakes, run, says

from skyrl_fast.batch import batch_from_trajectories
from skyrl_fast.config import SamplingParams
from skyrl_fast.rollout.engine.vllm_engine import VllmEngine
from skyrl_fast.rollout.engine.vllm_start import VllmSetup
from skyrl_fast.rollout.tool_calls import ToolCallParser

openai = pytest.importorskip("openai")
register_fakes()

GREEDY = SamplingParams(max_generate_length=16, temperature=0.0, stop=["!"])
TURNS = 4


async def counting(task: Any) -> dict[str, float]:
    """Do what `CountingEnv` does, as an agent."""
    messages = [USER]
    calls = {}
    for turn in range(1, TURNS + 1):
        answer = await chat(
            task, messages, stop=["!"], extra_body={"include_stop_str_in_output": True}
        )
        calls[answer.id] = float(turn)
        text = answer.choices[0].message.content
        observation = {"role": "user", "content": f"obs{turn}"}
        messages += [{"role": "assistant", "content": text}, observation]
    return {"reward": None, "call_rewards": calls}


def rows(trajectory: Any) -> list[tuple[Any, ...]]:
    return [
        (s.prompt_token_ids, s.response_ids, s.loss_mask, s.rollout_logprobs, s.reward, s.text)
        for s in trajectory.steps
    ]


@pytest.mark.spec("gateway.step-per-call")
def test_same_rows_as_an_environment(tiny_tokenizer: Any) -> None:
    def answer(call: Call, n: int) -> Any:  # a greedy model: of the prompt alone
        digest = hashlib.sha256(str(call.prompt_token_ids).encode()).hexdigest()
        return says(tiny_tokenizer, digest[:5]) if n % 2 else says(
            tiny_tokenizer, digest[:5] + "!", end=False, stop="!"
        )  # fmt: skip

    config = loop_config(max_turns=50, sampling_params=GREEDY)
    prompt = prompt_with(turns=TURNS)
    (env,) = run(tiny_tokenizer, [prompt], config, ScriptedEngine(answer))
    agent = played(
        counting, tiny_tokenizer, answer=answer, sampling_params=GREEDY, prompts=[prompt]
    ).only
    assert len(env.steps) == TURNS
    assert rows(agent) == rows(env)


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.spec("kept.ratio")
def test_recorded_logprobs_are_those_of_the_recorded_tokens(
    tiny_tokenizer: Any, tiny_model_folder: Path, tmp_path: Path
) -> None:
    """With answers that are no text, an edited history, a stream, JSON, and a forced tool."""
    pytest.importorskip("vllm")
    from transformers import AutoModelForCausalLM

    from skyrl_fast.train.model.policy import Policy

    async def agent(task: Any) -> float:
        messages: list[Any] = [USER]
        for turn in range(3):
            answer = (await chat(task, messages, max_tokens=24)).choices[0].message.content
            observation = {"role": "user", "content": f"obs{turn}"}
            messages += [{"role": "assistant", "content": answer}, observation]
        schema = {
            **{"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]},
            "additionalProperties": False,
        }
        tool = {"type": "function", "function": {"name": "look", "parameters": schema}}
        form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
        with pytest.raises(openai.BadRequestError, match="expected a form that xgrammar compiles"):
            wrong = {**form, "json_schema": {"name": "answer", "schema": {"type": "no such"}}}
            await chat(task, [USER], response_format=wrong)
        constrained = await chat(task, [USER], response_format=form)
        assert constrained.choices[0].message.content.lstrip().startswith("{")
        forced = await chat(task, [USER], tools=[tool], tool_choice="required")
        assert forced.choices[0].message.tool_calls[0].function.name == "look"
        events = await chat(task, messages[2:], stream=True, max_tokens=24)
        assert [e.choices[0].finish_reason async for e in events][-1] in ("stop", "length")
        return 1.0

    setup = VllmSetup(str(tiny_model_folder), log_file=str(tmp_path / "engine.log"))
    sampling = SamplingParams(max_generate_length=120)
    out = played(
        agent, tiny_tokenizer, engine=VllmEngine(setup), sampling_params=sampling,
        tool_parser=ToolCallParser("hermes", tiny_tokenizer), max_input_length=900,
    )  # fmt: skip
    assert out.only.failure is None
    assert len(out.only.steps) == 6
    metrics = out.only.env_metrics
    # What comes back of an answer lacks the special tokens that a random model samples inside it.
    special = set(tiny_tokenizer.all_special_ids)
    continued = [s for s in out.only.steps[:2] if special.isdisjoint(s.response_ids[:-1])]
    assert continued
    assert (metrics["first_prompts"], metrics["continued_prompts"]) == (1, len(continued))
    others = metrics["calls"] - 1 - len(continued)
    assert metrics["forked_prompts"] + metrics["restarted_prompts"] == others
    for index in (0, 1, 2, 5):
        step = out.only.steps[index]
        assert step.kept_ids is None
        assert step.rollout_logprobs == pytest.approx(out.logprobs[index], abs=1e-5)  # float32
    for step in out.only.steps[3:5]:
        assert min(map(len, step.kept_ids)) < 20  # of 259: the grammar's
    policy = Policy(AutoModelForCausalLM.from_pretrained(tiny_model_folder, dtype="float32"))
    again = policy.batch_logprobs(batch_from_trajectories([out.only]))
    recorded = [logprob for step in out.only.steps for logprob in step.rollout_logprobs]
    # float32: 5e-6 to 1.3e-5 over samples of this model, whose random weights have peaks.
    assert recorded == pytest.approx(again.tolist(), abs=2e-5)
