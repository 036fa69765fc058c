"""Settings of distillation: the teachers of a policy, and the KL between policy and teacher."""
# ruff: noqa: RUF009 - setting() returns dataclass fields

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from skyrl_fast.setting import setting

DEFAULT = "default"  # in place of a source: all others
DIRECTIONS = ("reverse", "forward")
SETTING = "trainer.algorithm.distillation"
_URL = ("http://", "https://")


@dataclass(slots=True)
class DistillationConfig:
    """The term of the loss that moves the policy to a teacher, on the policy's own samples."""

    teachers: dict[str, str] = setting(
        dict,
        "teacher of each data source, by the rows' data_source; default: of all others. Folder or "
        "hub name of a model, for which the run starts an engine, or address of a `vllm serve`. "
        "Rows of a source without one are not distilled. Empty: no distillation",
    )
    top_k: int = setting(
        0,
        "the teacher's most likely tokens, at each position, over which the KL is summed, all "
        "others together being one more; 0: the KL is estimated by the sampled token",
        at_least=0,
    )
    direction: str = setting(
        "reverse",
        "of the KL with top_k. reverse: KL(policy, teacher), which concentrates on what the "
        "teacher finds likely; forward: KL(teacher, policy), which covers all of it",
        choices=DIRECTIONS,
    )
    coef: float = setting(
        1.0, "weight of the KL between policy and teacher in the loss", at_least=0, finite=True
    )
    api_key_file: str | None = setting(
        None, "file with the key that is sent to the teachers' servers; null: none"
    )
    engine_init_kwargs: dict[str, Any] = setting(
        {}, "vLLM engine arguments of the teachers that the run starts"
    )

    @property
    def is_on(self) -> bool:
        return bool(self.teachers)

    @property
    def started_models(self) -> dict[str, str]:
        """Teachers for which the run starts engines, by data source."""
        models = {}
        for source, teacher in self.teachers.items():
            if not is_server(teacher):
                models[source] = teacher
        return models


def is_server(teacher: str) -> bool:
    """Return whether a teacher is the address of a server, not a model."""
    return teacher.startswith(_URL)


def teacher_of(teachers: Mapping[str, str], source: str | None) -> str | None:
    """Return the teacher of a data source; None: its rows are not distilled.

    Example:
        >>> teacher_of({"math": "a", "default": "b"}, "code")
        'b'
    """
    return teachers.get(source or DEFAULT, teachers.get(DEFAULT))


def setting_of(teachers: Mapping[str, str], teacher: str) -> str:
    """Return the dotted key of the first source of a teacher."""
    source = next(name for name, given in teachers.items() if given == teacher)
    return f"{SETTING}.teachers.{source}"
