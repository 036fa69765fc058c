"""Supervised fine-tuning: demonstrations as steps, and runs on them."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers._fakes import tiny_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from skyrl_fast.cli import main
from skyrl_fast.config import GeneratorConfig, SamplingParams
from skyrl_fast.train.data.demonstrations import build_demonstration, chat_of
from skyrl_fast.train.data.prompts import prompts_from
from skyrl_fast.train.model.policy import Policy
from skyrl_fast.train.output.loggers import read_metrics
from skyrl_fast.train.output.summary import summary
from skyrl_fast.train.setup.errors import SetupError
from skyrl_fast.train.supervised import sft, sft_by_settings

CHAT = [
    {"role": "user", "content": "ab"},
    {"role": "assistant", "content": "cd"},
    {"role": "user", "content": "e"},
    {"role": "assistant", "content": "f"},
]


def generator(**options: Any) -> GeneratorConfig:
    sampling = SamplingParams(max_generate_length=options.pop("longest", 8))
    return GeneratorConfig(
        max_input_length=64, context="append", sampling_params=sampling, **options
    )


@pytest.mark.spec("sft.steps")
def test_each_answer_is_a_step_with_the_prompt_of_the_agent_loop(tiny_tokenizer: Any) -> None:
    chat = [*CHAT, {"role": "user", "content": "unanswered"}]
    steps = build_demonstration(chat_of(chat, "row 0"), tiny_tokenizer, generator(), "row 0")
    texts = [tiny_tokenizer.decode(step.prompt_token_ids) for step in steps]
    answers = [tiny_tokenizer.decode(step.response_ids) for step in steps]
    assert answers == ["cd<|im_end|>", "f<|im_end|>"]
    assert texts[0].endswith("assistant\n") and "ab" in texts[0]
    assert texts[1].startswith(texts[0] + answers[0]) and texts[1].endswith("assistant\n")
    assert [step.loss_mask for step in steps] == [[1, 1, 1], [1, 1]]
    assert [step.text for step in steps] == ["cd", "f"]


def test_the_text_of_a_tool_call_is_that_of_its_tokens(tiny_tokenizer: Any) -> None:
    template = (
        "{% for m in messages %}{{ m.content }}"
        "{% for call in m.tool_calls or [] %}({{ call.function.name }}){% endfor %}<|im_end|>"
        "{% endfor %}"
    )
    call = {"type": "function", "function": {"name": "look", "arguments": {}}}
    chat = [CHAT[0], {"role": "assistant", "content": "", "tool_calls": [call]}]
    settings = generator(chat_template=template)
    (step,) = build_demonstration(chat_of(chat, "row 0"), tiny_tokenizer, settings, "row 0")
    assert step.text == "(look)"


@pytest.mark.spec("sft.rows")
def test_prompt_and_completion_and_weights() -> None:
    both = chat_of({"prompt": "a", "completion": "b"}, "row 0")
    assert both == [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert chat_of({"messages": CHAT}, "row 0") == CHAT == chat_of(CHAT, "row 0")


def test_answers_of_weight_0_are_context_only(tiny_tokenizer: Any) -> None:
    chat = [CHAT[0], {**CHAT[1], "weight": 0}, *CHAT[2:]]
    steps = build_demonstration(chat_of(chat, "row 0"), tiny_tokenizer, generator(), "row 0")
    assert [step.loss_mask for step in steps] == [[0, 0, 0], [1, 1]]


@pytest.mark.parametrize(
    "flag",
    [{"weight": "0"}, {"weight": 0.0}, {"train": False}, {"loss": False}, {"loss": "false"},
     {"trainable": False}, {"loss_weight": 0}, {"train": True, "weight": 0}],
)  # fmt: skip
def test_flags_exclude_answers(flag: dict[str, Any], tiny_tokenizer: Any) -> None:
    kept = {"weight": 1, "train": True, "loss": None}
    chat = [{**CHAT[0], "train": False}, {**CHAT[1], **flag}, CHAT[2], {**CHAT[3], **kept}]
    steps = build_demonstration(chat_of(chat, "row 0"), tiny_tokenizer, generator(), "row 0")
    assert [step.loss_mask for step in steps] == [[0, 0, 0], [1, 1]]
    assert chat_of([{**CHAT[0], "weight": 0.5}, CHAT[1]], "row 0")  # no effect on a prompt
    (name,) = [name for name in flag if name != "train"] or ["train"]
    with pytest.raises(ValueError, match=f"^row 0: {name}: expected 0, 1, true or false, got 0.5"):
        chat_of([CHAT[0], {**CHAT[1], name: 0.5}], "row 0")


TOOLS = [{"type": "function", "function": {"name": "look"}}]


@pytest.mark.spec("sft.template-arguments")
@pytest.mark.parametrize("as_text", [False, True])
def test_template_arguments_of_a_row(
    as_text: bool, tiny_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = (
        "{% for t in tools or [] %}({{ t.function.name }}){% endfor %}{{ style }} "
        "{% for m in messages %}{{ m.role }}:{{ m.content }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    given: dict[str, Any] = {"tools": TOOLS, "chat_template_kwargs": {"style": "short"}}
    given = {name: json.dumps(v) for name, v in given.items()} if as_text else given

    def made(config: Any, _: Any, request: Any) -> Any:
        async def go() -> Any:
            rollouts = await request.make_rollouts(config, tiny_tokenizer, "")
            tasks = prompts_from(request.prompts, default_env_class="e")
            return await rollouts.generate(tasks, step=0, phase="train")

        return asyncio.run(go())

    monkeypatch.setattr("skyrl_fast.train.supervised.run_request", made)
    kwargs = {"style": "long", "tools": TOOLS * 2}
    options = {"chat_template": template, "chat_template_kwargs": kwargs, "max_input_length": 64}
    config = {"trainer.policy.model.path": "m"}
    config |= {f"generator.{name}": value for name, value in options.items()}
    rows: Any = [{"messages": CHAT[:2], **given}, CHAT[:2]]
    trajectories: Any = sft_by_settings(config, demonstrations=rows)
    texts = [tiny_tokenizer.decode(list(t.steps[0].prompt_token_ids)) for t in trajectories]
    end = " user:ab<|im_end|>assistant:"
    assert texts == [f"(look)short{end}", f"(look)(look)long{end}"]


@pytest.mark.spec("sft.refused-rows")
def test_rows_that_the_template_refuses_are_named_before_a_model_is_loaded(folder: Path) -> None:
    for weights in (folder / "model").glob("*.safetensors"):
        weights.unlink()  # so that loading it would be another error
    refusing = "{{ raise_exception('no b') if 'b' in messages[-1].content }}"
    rows = [{"prompt": "a", "completion": "c"}] * 3 + [{"prompt": "b", "completion": "c"}]
    options = settings(folder, "run", **{"generator.chat_template": refusing})
    with pytest.raises(SetupError, match=r"^demonstrations, row 3, message 1: the chat template"):
        sft(options, demonstrations=rows)


@pytest.mark.parametrize(
    "row",
    [
        {}, [], "text", {"prompt": "a"}, CHAT[:1], CHAT[1:2], {"messages": [{"content": "a"}]},
        [CHAT[0], {**CHAT[1], "weight": 0}],
    ],
)  # fmt: skip
def test_rows_without_an_answer_to_train_are_named(row: Any) -> None:
    with pytest.raises(ValueError, match=r"^file, row 3: expected "):
        chat_of(row, "file, row 3")


@pytest.mark.spec("sft.lengths")
def test_too_long_demonstrations_are_named(tiny_tokenizer: Any) -> None:
    with pytest.raises(ValueError, match=r"row 0, message 1: expected an? answer of at most .*=2"):
        build_demonstration(CHAT, tiny_tokenizer, generator(longest=2), "row 0")


@pytest.fixture
def folder(tmp_path: Path, tiny_tokenizer: Any) -> Path:
    model = tiny_model()
    model.resize_token_embeddings(len(tiny_tokenizer))
    model.save_pretrained(tmp_path / "model")
    tiny_tokenizer.save_pretrained(tmp_path / "model")
    lines = [json.dumps({"messages": CHAT}), json.dumps({"prompt": "x", "completion": "yz"})] * 4
    (tmp_path / "chats.jsonl").write_text("\n".join(lines))
    return tmp_path


def settings(folder: Path, name: str, **more: Any) -> dict[str, Any]:
    return {
        "data.train_data": [str(folder / "chats.jsonl")],
        "data.val_data": [str(folder / "chats.jsonl")],
        "trainer.run_path": str(folder / name),
        "trainer.policy.model.path": str(folder / "model"),
        "trainer.epochs": 6,
        "trainer.train_batch_size": 4,
        "trainer.policy_mini_batch_size": 4,
        "trainer.eval_interval": 4,
        "trainer.policy.optimizer_config.lr": 0.01,
        "trainer.plot": False,
        **more,
    }


@pytest.mark.spec("lora.frozen-base")
def test_an_adapter_is_trained_on_demonstrations(folder: Path) -> None:
    pytest.importorskip("peft")
    lora = {"trainer.policy.model.lora.rank": 4, "trainer.policy.optimizer_config.lr": 0.05}
    template = "{% for m in messages %}{{ m.role }}:{{ m.content }}<|im_end|>{% endfor %}"
    template += "{% if add_generation_prompt %}assistant:{% endif %}"
    lora["generator.chat_template"] = template
    result = sft(settings(folder, "adapter", **lora))
    assert result.after > result.before  # by little: the head of this model is random and frozen
    assert (result.checkpoint / "policy/adapter_model.safetensors").is_file()
    # With the chat template that was trained, not the base's.
    for form in ("adapter", "model"):
        assert main(["export", str(result.run_path), str(folder / f"to-{form}"), "--to", form]) == 0
        assert AutoTokenizer.from_pretrained(folder / f"to-{form}").chat_template == template
    assert AutoModelForCausalLM.from_pretrained(folder / "to-model").num_parameters() > 0


@pytest.mark.spec("sft.run")
def test_loss_falls_and_rows_merged_rows_and_trees_agree(folder: Path) -> None:
    losses = {}
    (folder / "val.jsonl").write_text(json.dumps({"messages": CHAT, "data_source": "told"}))
    forms = {
        "step": {},
        "merged": {"trainer.rows": "merged"},
        "tree": {"trainer.row_layout": "tree"},
    }
    for rows, form in forms.items():
        more = {
            "trainer.row_layout": "sequence",
            **form,
            "data.val_data": [str(folder / "val.jsonl")],
        }
        result = sft(settings(folder, rows, **more))
        assert (result.step, result.total_steps) == (12, 12)
        assert "trajectories:" not in summary(result) and "metrics:" in summary(result)
        metrics = read_metrics(result.metrics)
        assert metrics[0]["eval/told/avg_score"] == result.before
        losses[rows] = [row["policy/cross_entropy"] for row in metrics if row["step"]]
        assert result.after > result.before  # mean log-probability of held-out answers
        assert result.checkpoint is not None
        assert (result.checkpoint / "policy/config.json").is_file()
    assert losses["step"][-1] < 0.7 * losses["step"][0]
    for rows in ("merged", "tree"):
        assert torch.allclose(torch.tensor(losses[rows]), torch.tensor(losses["step"]), atol=1e-4)


def test_the_lines_of_a_run_show_the_loss_and_nothing_of_rollouts(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sft(settings(folder, "run", **{"trainer.epochs": 1, "trainer.eval_interval": -1}))
    printed = capsys.readouterr().err
    assert "step 2/2  cross-entropy " in printed
    assert "turns" not in printed
    assert "reward 0" not in printed


@pytest.mark.spec("sft.run")
def test_settings_of_reinforcement_learning_change_nothing(folder: Path) -> None:
    of_agent = {
        "trainer.algorithm": {
            "advantage_estimator": "gae",
            "loss_reduction": "sequence_mean",
            "old_logprobs": "rollout",
            "use_entropy_loss": True,
            "zero_variance_filter": True,
        },
        "trainer.critic.model.path": "critic",
        "trainer.policy.moe_enable_routing_replay": True,
        "trainer.fully_async.enabled": True,
        "trainer.placement.colocate_all": False,
    }
    losses = []
    for name, more in (("plain", {}), ("agent", of_agent)):
        metrics = read_metrics(sft(settings(folder, name, **more)).metrics)
        losses.append([row["policy/loss"] for row in metrics if row["step"]])
    assert losses[0] == losses[1]


@pytest.mark.spec("sft.run")
def test_mini_batches_change_no_mean_over_tokens_and_need_no_other_pass(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes: list[int] = []
    monkeypatch.setattr(Policy, "batch_logprobs", lambda self, batch: passes.append(1))
    rows = []
    for size in (4, 1):
        more = {"trainer.policy_mini_batch_size": size, "trainer.policy.optimizer_config.lr": 0.0}
        options = settings(folder, str(size), **more, **{"trainer.epochs": 1, "data.val_data": []})
        chats = [{"prompt": "x", "completion": text * 3} for text in ("a", "bcde", "f", "ghi")]
        (row,) = (r for r in read_metrics(sft(options, demonstrations=chats).metrics) if r["step"])
        rows.append(row)
    assert not passes and "reward/zero_variance_share" not in rows[0]
    for name in ("policy/cross_entropy", "policy/policy_entropy"):
        assert rows[0][name] == pytest.approx(rows[1][name], rel=1e-5)


@pytest.mark.spec("sft.run")
def test_command_names_a_bad_row(
    folder: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (folder / "chats.jsonl").write_text('{"prompt": "a"}\n')
    config = tmp_path / "c.yaml"
    config.write_text(json.dumps(settings(folder, "run")))
    assert main(["sft", str(config)]) == 2
    assert "chats.jsonl, row 0: expected" in capsys.readouterr().err
    with pytest.raises(SetupError, match="demonstrations, row 0"):
        sft(settings(folder, "run"), demonstrations=[{"prompt": "a"}])
