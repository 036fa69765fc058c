"""The models of the distillation example: one tokenizer, the demonstrations of two experts."""

from pathlib import Path

import pytest

pytest.importorskip("transformers")

from examples.distillation.make_models import make_demonstrations, make_models
from examples.tiny_model.jsonl import read_jsonl
from skyrl_fast.train.setup.model_checks import check_vocabulary

SIZES = {"num_train": 8, "num_eval": 4, "num_demonstrations": 64}


def test_teacher_and_student_differ_by_their_experts_alone(tmp_path: Path) -> None:
    data = tmp_path / "data"
    make_demonstrations(data, **SIZES)
    for name in ("train.jsonl", "eval.jsonl"):
        assert (data / "careful" / name).read_bytes() == (data / "careless" / name).read_bytes()
    thoughtless = {}
    for expert in ("careful", "careless"):
        answers = [
            chat[-1]["content"] for chat in read_jsonl(data / expert / "demonstrations.jsonl")
        ]
        thoughtless[expert] = sum("<think>" not in answer for answer in answers)
    assert thoughtless["careful"] == 0 < thoughtless["careless"]
    make_models(data, tmp_path / "models", num_steps=1)
    student = tmp_path / "models/student"
    teacher = tmp_path / "models/teacher"
    check_vocabulary(student, teacher, "trainer.algorithm.distillation.teachers.default")
    weights = "model.safetensors"
    assert (student / weights).read_bytes() != (teacher / weights).read_bytes()
