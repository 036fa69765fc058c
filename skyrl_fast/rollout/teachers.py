"""Teachers of a policy: frozen models behind engines or servers, which score the policy's rows."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from os.path import expanduser
from pathlib import Path
from typing import Any

from skyrl_fast.config.distillation import (
    SETTING,
    DistillationConfig,
    is_server,
    setting_of,
    teacher_of,
)
from skyrl_fast.config.engine import InferenceEngineConfig
from skyrl_fast.config.model_folder import model_folder
from skyrl_fast.config.settings import Config, max_response_length
from skyrl_fast.rollout.engine.api_key import read_or_create_key
from skyrl_fast.rollout.engine.from_settings import read_positions, read_vocab_size
from skyrl_fast.rollout.engine.prompt_scores import PromptScores
from skyrl_fast.rollout.engine.protocol import (
    Engine,
    EngineDeadError,
    EngineError,
    RefusedRequestError,
)
from skyrl_fast.rollout.engine.remote import RemoteEngine
from skyrl_fast.rollout.engine.start_report import report_start
from skyrl_fast.rollout.engine.vllm_engine import VllmEngine
from skyrl_fast.rollout.engine.vllm_start import VllmSetup
from skyrl_fast.system.tasks import gather_or_cancel

log = logging.getLogger(__name__)

NEXT_TOKEN = 1  # vLLM samples one token after a sequence that it scores
SCORE_SECONDS = 600.0  # for one sequence, after which the engine counts as lost
MAX_ATTEMPTS = 3  # for an answer that failed while the engine runs
# For a teacher's tokenizer: words, signs, numbers and a line break.
PROBE_TEXT = "The teacher reads 3 + 14 = 17;\n\tSELECT name FROM users WHERE id > 42."


class TeacherError(EngineError):
    """A teacher cannot score the policy's rows; the message names it and its setting."""


@dataclass(frozen=True, slots=True)
class TeacherLimits:
    """How long a teacher is waited for, and how often it is started again.

    Args:
        seconds: for one sequence.
        max_restarts: between two sequences that it has scored.
        concurrent: sequences that it scores at a time.
    """

    seconds: float = SCORE_SECONDS
    max_restarts: int = 3
    concurrent: int = 256


LIMITS = TeacherLimits()


class Teacher:
    """A frozen model behind an engine.

    A sequence's scores depend on its tokens alone: those that an engine had when it died are asked
    for again once it is back, and the step continues.

    Args:
        setting: dotted key that names it, for errors.
        engine: that has the model.
        top_k: most likely tokens that are returned in the place of each.
        max_length: most tokens of a sequence; None: unknown.
    """

    def __init__(
        self,
        setting: str,
        engine: Engine,
        *,
        top_k: int = 0,
        max_length: int | None = None,
        limits: TeacherLimits = LIMITS,
    ) -> None:
        self.setting = setting
        self.engine = engine
        self.top_k = top_k
        self.max_length = max_length
        self.faults: Counter[str] = Counter()
        self._limits = limits
        self._room = asyncio.Semaphore(limits.concurrent)
        self._repairing = asyncio.Lock()
        self._starts = 0
        self._restarts = 0  # since the last sequence that it has scored

    async def start(self) -> None:
        """Load the model; return when sequences can be scored."""
        await self.engine.start()
        self._starts += 1

    async def close(self) -> None:
        await self.engine.close()

    async def score(self, token_ids: Sequence[int]) -> PromptScores:
        """Return how likely the teacher finds a sequence.

        Raises:
            TeacherError: the sequence is too long, or the teacher cannot score it.
            EngineDeadError: the engine is lost, and does not come back.
        """
        most = self.max_length
        if most is not None and len(token_ids) > most:
            raise TeacherError(
                f"{self.setting}: expected rows of at most {most} tokens, the teacher's limit, got "
                f"one of {len(token_ids)}"
            )
        async with self._room:
            return await self._score(token_ids)

    async def _score(self, token_ids: Sequence[int]) -> PromptScores:
        attempts = 0
        while True:
            start = self._starts
            try:
                async with asyncio.timeout(self._limits.seconds):
                    scores = await self.engine.score_prompt(token_ids, top_k=self.top_k)
            except RefusedRequestError as error:
                raise TeacherError(self._explain_refusal(error)) from error
            except (EngineDeadError, TimeoutError) as error:
                await self._repair(start, error)
            except EngineError as error:
                attempts += 1
                if attempts == MAX_ATTEMPTS:
                    raise TeacherError(f"{self.setting}: {error}") from error
            else:
                self._restarts = 0
                return scores
            self.faults["teacher_requests_sent_again"] += 1

    def _explain_refusal(self, error: RefusedRequestError) -> str:
        text = f"{self.setting}: {error}"
        if self.top_k and "prompt logprobs of" in text:  # vLLM's words
            return f"{text}; start it with --max-logprobs {self.top_k} or more"
        return text

    async def _repair(self, start: int, error: Exception) -> None:
        """Start the engine again, unless another sequence has done so since `start`."""
        async with self._repairing:
            while self._starts == start:
                reason = str(error) or f"no answer within {self._limits.seconds:g} s"
                most = self._limits.max_restarts
                if self._restarts == most:
                    raise EngineDeadError(
                        f"{self.setting}: the teacher is lost, and {most} restarts did not bring "
                        f"it back: {reason}"
                    )
                self._restarts += 1
                self.faults["teacher_restarts"] += 1
                log.warning(
                    "TEACHER LOST: %s: %s; restart %d of %d, then its rows are scored again",
                    self.setting,
                    reason,
                    self._restarts,
                    most,
                )
                try:
                    await self.engine.restart()
                except EngineDeadError as again:
                    error = again
                else:
                    self._starts += 1


class Teachers:
    """The teachers of a run.

    Args:
        sources: teacher by data source, as in the settings.
        teachers: by the name that `sources` gives them.
    """

    def __init__(self, sources: Mapping[str, str], teachers: Mapping[str, Teacher]) -> None:
        self._sources = sources
        self._teachers = teachers

    def of(self, source: str | None) -> Teacher | None:
        """Return the teacher of a data source; None: its rows are not distilled."""
        name = teacher_of(self._sources, source)
        return None if name is None else self._teachers[name]

    async def start(self) -> None:
        """Start all, one after the other; if one does not start, all are closed."""
        try:
            for teacher in self._teachers.values():
                await teacher.start()
        except BaseException:  # Ctrl-C, too
            await self.close()
            raise

    async def close(self) -> None:
        for teacher in self._teachers.values():
            await teacher.close()

    async def check(self, probe: Sequence[int]) -> None:
        """Raise TeacherError unless each teacher scores a sequence of this policy's tokens."""
        await gather_or_cancel(teacher.score(probe) for teacher in self._teachers.values())

    def faults(self) -> dict[str, float]:
        """Return metrics of what was handled since the start."""
        counts = Counter({"teacher_restarts": 0, "teacher_requests_sent_again": 0})
        for teacher in self._teachers.values():
            counts.update(teacher.faults)
        return {f"faults/{name}": float(number) for name, number in counts.items()}


async def start_teachers(
    config: Config, tokenizer: Any, *, say: Callable[[str], None] | None = None
) -> Teachers | None:
    """Start the engines of a run's teachers, or connect to their servers; None: it has none.

    Args:
        config: of the run.
        tokenizer: the policy's, by which servers are compared.
        say: called with lines about the start; None: they are logged.

    Raises:
        TeacherError: a server reads the policy's tokens as others, has a lower limit than the rows'
            length, or returns no log-probabilities of a prompt.
        EngineDeadError: an engine did not start, or a server does not answer.
    """
    settings = config.trainer.algorithm.distillation
    if not settings.is_on:
        return None
    teachers = {}
    for number, name in enumerate(dict.fromkeys(settings.teachers.values())):
        teachers[name] = _make_teacher(config, name, number)
    result = Teachers(settings.teachers, teachers)
    places = ", ".join(teachers)
    with report_start(f"teachers start: {places}", None, say or log.info):
        await result.start()
        try:
            await _check_started(config, tokenizer, teachers)
            await result.check(_encode(tokenizer, PROBE_TEXT)[: _longest_row(config)])
        except BaseException:
            await result.close()
            raise
    return result


def check_teachers(config: Config) -> None:
    """Check what can be known of the models that the run starts, before anything is loaded.

    Raises:
        ValueError: rows can be longer than a teacher's limit.
    """
    settings = config.trainer.algorithm.distillation
    for name in dict.fromkeys(settings.started_models.values()):
        _make_setup(config, name, 0)


async def _check_started(config: Config, tokenizer: Any, teachers: Mapping[str, Teacher]) -> None:
    for teacher in teachers.values():
        engine = teacher.engine
        if isinstance(engine, RemoteEngine):
            await _check_server(engine, teacher, tokenizer, _longest_row(config))


async def _check_server(
    engine: RemoteEngine, teacher: Teacher, tokenizer: Any, longest: int
) -> None:
    most = engine.max_model_len
    if most is not None and longest > most - NEXT_TOKEN:
        raise TeacherError(
            f"{teacher.setting}: expected a server with max_model_len of at least "
            f"{longest + NEXT_TOKEN}, for rows of up to {longest} tokens "
            f"(generator.max_input_length and max_generate_length) and one more, got {most} of "
            f"{engine.name}"
        )
    if most is not None:
        teacher.max_length = most - NEXT_TOKEN
    wanted = _encode(tokenizer, PROBE_TEXT)
    found = await engine.tokenize(PROBE_TEXT)
    if found is None:
        log.warning(
            "%s: %s does not tokenize, so that its tokenizer could not be compared with the "
            "policy's: it must be the same",
            teacher.setting,
            engine.name,
        )
    elif found != wanted:
        raise TeacherError(
            f"{teacher.setting}: expected a teacher with the policy's tokenizer, which encodes "
            f"{PROBE_TEXT!r} as {wanted}, got {found} of {engine.name}"
        )


def _encode(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False))


def _make_teacher(config: Config, name: str, number: int) -> Teacher:
    settings = config.trainer.algorithm.distillation
    engine = config.generator.inference_engine
    setting = setting_of(settings.teachers, name)
    limits = TeacherLimits(max_restarts=engine.max_restarts, concurrent=engine.max_num_seqs)
    if is_server(name):
        remote = RemoteEngine(name, api_key=_read_key(settings), weight_sync=None)
        return Teacher(setting, remote, top_k=settings.top_k, limits=limits)
    setup = _make_setup(config, name, number)
    assert setup.max_model_len is not None
    most = setup.max_model_len - NEXT_TOKEN
    return Teacher(setting, VllmEngine(setup), top_k=settings.top_k, max_length=most, limits=limits)


def _read_key(settings: DistillationConfig) -> str | None:
    file = settings.api_key_file
    if file is None:
        return None
    return read_or_create_key(Path(expanduser(file)), f"{SETTING}.api_key_file")


def _longest_row(config: Config) -> int:
    return config.generator.max_input_length + max_response_length(config)


def _make_setup(config: Config, name: str, number: int) -> VllmSetup:
    """Return the start-up settings of a teacher's engine; ValueError if rows can be too long."""
    settings = config.trainer.algorithm.distillation
    setting = setting_of(settings.teachers, name)
    folder = str(model_folder(name, setting=setting))
    engine = config.generator.inference_engine
    longest = _longest_row(config)
    size = read_vocab_size(folder)
    if size is not None and settings.top_k > size:
        raise ValueError(
            f"{SETTING}.top_k: expected at most the {size} tokens of {folder}, got {settings.top_k}"
        )
    needed = longest + NEXT_TOKEN
    given = settings.engine_init_kwargs.get("max_model_len")
    positions = read_positions(folder)
    for what, most in (("max_model_len", given), ("max_position_embeddings", positions)):
        if isinstance(most, int) and needed > most:
            raise ValueError(
                f"{setting}: expected a teacher with {what} of at least {needed}, for rows of up "
                f"to {longest} tokens (generator.max_input_length and max_generate_length) and "
                f"one more, got {most} of {folder}"
            )
    return VllmSetup(
        model=folder,
        engine=InferenceEngineConfig(
            model_dtype=config.engine_dtype,
            enforce_eager=engine.enforce_eager,
            max_num_seqs=engine.max_num_seqs,
            max_num_batched_tokens=engine.max_num_batched_tokens,
            # A prompt whose log-probabilities are asked for is computed from its first token on.
            enable_prefix_caching=False,
            num_threads=engine.num_threads,
            engine_init_kwargs=settings.engine_init_kwargs,
        ),
        max_model_len=given or needed,
        seed=config.trainer.seed,
        log_file=str(Path(config.trainer.run_path) / f"teacher_{number}.log"),
        takes_turns=config.max_staleness == 0,
    )
