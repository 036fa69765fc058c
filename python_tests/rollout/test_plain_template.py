"""The plain chat template, for base models, and the check that there is one."""

from pathlib import Path
from typing import Any

import pytest

from skyrl_fast.config import load_config
from skyrl_fast.rollout.chat_template import ChatTemplate
from skyrl_fast.rollout.context import begin_context
from skyrl_fast.rollout.loop_settings import read_chat_template
from skyrl_fast.train.flow.vllm_rollouts import check_rollouts


@pytest.mark.spec("run.chat-template")
@pytest.mark.parametrize("kind", ["append", "retemplate"])
def test_turns_of_the_plain_template_continue_token_by_token(
    kind: str, tiny_tokenizer: Any
) -> None:
    template = ChatTemplate(tiny_tokenizer, read_chat_template("plain"), {}, max_length=512)
    context = begin_context(kind, template, [{"role": "user", "content": "Guess."}])
    first = list(context.prompt_token_ids())  # the context extends its own
    assert tiny_tokenizer.decode(first) == "User: Guess.\nAssistant: "
    answer = [*tiny_tokenizer.encode("5", add_special_tokens=False), tiny_tokenizer.eos_token_id]
    context.add_response(
        answer, {"role": "assistant", "content": "5"}, replaced=False, stopped=True
    )
    context.add_observation([{"role": "user", "content": "higher"}])
    second = context.prompt_token_ids()
    end = tiny_tokenizer.eos_token
    assert second[: len(first) + len(answer)] == [*first, *answer]
    assert tiny_tokenizer.decode(second) == (
        f"User: Guess.\nAssistant: 5{end}\nUser: higher\nAssistant: "
    )


@pytest.mark.vllm
@pytest.mark.spec("run.chat-template")
def test_a_model_without_a_template_is_refused_before_anything_is_loaded(
    tiny_model_folder: Path, tmp_path: Path
) -> None:
    import shutil

    from transformers import AutoTokenizer

    folder = tmp_path / "base"
    shutil.copytree(tiny_model_folder, folder)
    tokenizer = AutoTokenizer.from_pretrained(str(folder))
    tokenizer.chat_template = None
    for path in folder.glob("chat_template*"):
        path.unlink()
    tokenizer.save_pretrained(str(folder))

    def config(*overrides: str) -> Any:
        lengths = [
            "trainer.max_prompt_length=16",
            "generator.sampling_params.max_generate_length=8",
        ]
        model = f"trainer.policy.model.path={folder}"
        return load_config(None, ["data.train_data=[x.jsonl]", model, *lengths, *overrides])

    with pytest.raises(
        ValueError, match=r"generator.chat_template: .*, or plain, as the tokenizer"
    ):
        check_rollouts(config(), str(folder), prompts=[])
    check_rollouts(config("generator.chat_template=plain"), str(folder), prompts=[])
