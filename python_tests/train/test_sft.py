"""Supervised fine-tuning: demonstrations as steps, and runs on them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

import torch
from helpers._fakes import tiny_model

from skyrl_fast.cli import main
from skyrl_fast.config import GeneratorConfig, SamplingParams
from skyrl_fast.train.data.demonstrations import chat_of, demonstrated_steps
from skyrl_fast.train.output.loggers import read_metrics
from skyrl_fast.train.setup.errors import SetupError
from skyrl_fast.train.supervised import sft

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
    steps = demonstrated_steps(chat_of(chat, "row 0"), tiny_tokenizer, generator(), "row 0")
    texts = [tiny_tokenizer.decode(step.prompt_token_ids) for step in steps]
    answers = [tiny_tokenizer.decode(step.response_ids) for step in steps]
    assert answers == ["cd<|im_end|>", "f<|im_end|>"]
    assert texts[0].endswith("assistant\n") and "ab" in texts[0]
    assert texts[1].startswith(texts[0] + answers[0]) and texts[1].endswith("assistant\n")
    assert [step.loss_mask for step in steps] == [[1, 1, 1], [1, 1]]


@pytest.mark.spec("sft.rows")
def test_prompt_and_completion_and_weights() -> None:
    both = chat_of({"prompt": "a", "completion": "b"}, "row 0")
    assert both == [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert chat_of({"messages": CHAT}, "row 0") == CHAT == chat_of(CHAT, "row 0")


@pytest.mark.spec("sft.rows")
def test_answers_of_weight_0_are_context_only(tiny_tokenizer: Any) -> None:
    chat = [CHAT[0], {**CHAT[1], "weight": 0}, *CHAT[2:]]
    steps = demonstrated_steps(chat_of(chat, "row 0"), tiny_tokenizer, generator(), "row 0")
    assert [step.loss_mask for step in steps] == [[0, 0, 0], [1, 1]]


@pytest.mark.spec("sft.rows")
@pytest.mark.parametrize(
    "row",
    [
        {}, [], "text", {"prompt": "a"}, CHAT[:1], CHAT[1:2], {"messages": [{"content": "a"}]},
        [CHAT[0], {**CHAT[1], "weight": 0}],
    ],
)  # fmt: skip
def test_rows_without_an_answer_to_train_are_named(row: Any) -> None:
    with pytest.raises(ValueError, match=r"^file, row 3: wanted "):
        chat_of(row, "file, row 3")


@pytest.mark.spec("sft.lengths")
def test_too_long_demonstrations_are_named(tiny_tokenizer: Any) -> None:
    with pytest.raises(ValueError, match=r"row 0, message 1: wanted an? answer of at most .*=2"):
        demonstrated_steps(CHAT, tiny_tokenizer, generator(longest=2), "row 0")


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


@pytest.mark.spec("sft.run")
def test_loss_falls_and_rows_merged_rows_and_trees_agree(folder: Path) -> None:
    losses = {}
    for rows in ("step", "merged", "tree"):
        result = sft(settings(folder, rows, **{"trainer.rows": rows}))
        assert (result.step, result.total_steps) == (12, 12)
        metrics = read_metrics(result.metrics)
        losses[rows] = [row["policy/cross_entropy"] for row in metrics if row["step"]]
        assert result.after > result.before  # mean log-probability of held-out answers
        assert result.checkpoint is not None
        assert (result.checkpoint / "policy/config.json").is_file()
    assert losses["step"][-1] < 0.7 * losses["step"][0]
    for rows in ("merged", "tree"):
        assert torch.allclose(torch.tensor(losses[rows]), torch.tensor(losses["step"]), atol=1e-4)


@pytest.mark.spec("sft.run")
def test_command_names_a_bad_row(
    folder: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (folder / "chats.jsonl").write_text('{"prompt": "a"}\n')
    config = tmp_path / "c.yaml"
    config.write_text(json.dumps(settings(folder, "run")))
    assert main(["sft", str(config)]) == 2
    assert "chats.jsonl, row 0: wanted" in capsys.readouterr().err
    with pytest.raises(SetupError, match="demonstrations, row 0"):
        sft(settings(folder, "run"), demonstrations=[{"prompt": "a"}])
