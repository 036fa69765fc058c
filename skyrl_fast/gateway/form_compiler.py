"""Forms of answers compiled in a process, under limits, before an engine gets them.

vLLM reads a form in its event loop, compiles it in threads that all forms share, and computes the
allowed tokens of each step in the engine's loop. No size of a form bounds these times: a pattern
of 30 characters can take minutes with a vocabulary of 150,000 tokens. So each form is compiled
here first, by the same compiler, and what takes too long is refused.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import resource
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from skyrl_fast.gateway.form_limits import FormError, check_form
from skyrl_fast.rollout.scripted import PlainTokenizer
from skyrl_fast.rollout.workers.calls import ProcessCalls
from skyrl_fast.rollout.workers.protocol import CallResult, HandlerSettings

COMPILER = "xgrammar"  # vLLM's own
MAX_PROCESSES = 2
MAX_RESULTS = 1_000  # remembered
CALL_SECONDS = 120.0  # elapsed, on a machine that does much else
# Seconds of processor time. Usual forms take a hundredth of each, with 150,000 tokens.
READ_SECONDS = 0.5  # vLLM's event loop, with all its requests, waits
COMPILE_SECONDS = 10  # other forms wait
MASK_SECONDS = 0.1  # a step of the engine waits
NUM_MASKS = 32  # tokens of a random answer
CHOICE_ESCAPES = re.compile(r'(["\\])')  # as vLLM's
MAX_DATA_BYTES = 4 << 30  # memory of the process
COMPILE_THREADS = 8  # as vLLM's
NICENESS = 10
MAX_CACHE_BYTES = 64 << 20


class FormCompiler:
    """Checks the forms that requests ask for."""

    def __init__(self, tokenizer: Any) -> None:
        self._calls = ProcessCalls(_Settings(tokenizer), MAX_PROCESSES)
        self._refusals: dict[str, str] = {}  # "" for a form that is fine
        # The plain tokenizer of scripted answers has no vocabulary to compile a form for.
        is_plain = isinstance(tokenizer, PlainTokenizer)
        self._has_compiler = not is_plain and importlib.util.find_spec(COMPILER) is not None

    async def check(self, form: Mapping[str, Any]) -> None:
        """Raise FormError if vLLM's structured outputs are too large, invalid, or take too long.

        Only their size is checked where the compiler is not installed.
        """
        check_form(form)
        if not self._has_compiler or "json_object" in form:
            return
        key = json.dumps(form)
        if key not in self._refusals:
            refusal = await self._refusal(form)
            while len(self._refusals) >= MAX_RESULTS:
                del self._refusals[next(iter(self._refusals))]
            self._refusals[key] = refusal
        if self._refusals[key]:
            raise FormError(self._refusals[key])

    async def _refusal(self, form: Mapping[str, Any]) -> str:
        ((kind, value),) = form.items()
        is_text = isinstance(value, str)
        if is_text:
            argument = value
        else:
            argument = json.dumps(value)
        result = await self._calls.call(kind, argument, CALL_SECONDS)
        if result.failure is not None:  # such as a process that was killed
            limits = f"{COMPILE_SECONDS} s of processor time and {MAX_DATA_BYTES >> 30} GiB"
            return f"{kind}: expected a form that compiles within {limits}: {result.failure}"
        return str(result.value)


@dataclass(frozen=True, slots=True)
class _Settings(HandlerSettings):
    tokenizer: Any

    modules: ClassVar[Sequence[str]] = (COMPILER,)
    max_bytes: ClassVar[int] = 1 << 20

    def handler(self) -> _Handler:
        return _Handler(self.tokenizer)

    def check_value(self, what: str, value: Any) -> str:
        return str(value)


class _Handler:
    def __init__(self, tokenizer: Any) -> None:
        import xgrammar

        self._xgrammar = xgrammar
        self._vocab_size = len(tokenizer)
        info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=self._vocab_size)
        self._compiler = xgrammar.GrammarCompiler(
            info,
            max_threads=COMPILE_THREADS,
            cache_enabled=True,  # without it, some forms compile that fail with it
            cache_limit_bytes=MAX_CACHE_BYTES,
        )
        os.nice(NICENESS)  # an engine on the same processors goes first
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (MAX_DATA_BYTES, hard))

    def call(self, what: str, argument: str) -> CallResult:
        """Return why a form is refused, "" for nothing."""
        _, hard = resource.getrlimit(resource.RLIMIT_CPU)  # beyond the soft one: SIGXCPU
        used = int(time.process_time()) + 1
        resource.setrlimit(resource.RLIMIT_CPU, (used + COMPILE_SECONDS, hard))
        try:
            return CallResult(self._refusal(what, argument))
        except Exception as error:  # raised by the compiler for what it cannot read
            text = " ".join(str(error).split())
            return CallResult(f"{what}: expected a form that {COMPILER} compiles: {text:.300}")

    def _refusal(self, kind: str, text: str) -> str:
        began = time.process_time()
        grammar = self._grammar(kind, text)
        seconds = time.process_time() - began
        if seconds > READ_SECONDS:
            expected = f"{kind}: expected a form that is read within {READ_SECONDS:g} s"
            return f"{expected} of processor time, got {seconds:.2g} s"
        compiled = self._compiler.compile_grammar(grammar)
        try:
            seconds = self._slowest_mask(compiled)
        except FormError as error:
            return f"{kind}: {error}"
        if seconds > MASK_SECONDS:
            expected = f"{kind}: expected a form whose tokens are found within {MASK_SECONDS:g} s"
            return f"{expected} of processor time, got {seconds:.2g} s"
        return ""

    def _grammar(self, kind: str, text: str) -> Any:
        grammar = self._xgrammar.Grammar
        if kind == "json":
            return grammar.from_json_schema(text)
        if kind == "regex":
            return grammar.from_regex(text)
        if kind == "structural_tag":
            return grammar.from_structural_tag(text)
        if kind == "choice":
            escaped = (CHOICE_ESCAPES.sub(r"\\\1", str(value)) for value in json.loads(text))
            text = "root ::= " + " | ".join(f'"{value}"' for value in escaped)
        if "::=" not in text:
            raise ValueError("expected EBNF, such as `root ::= [a-z]+`")
        return grammar.from_ebnf(text)

    def _slowest_mask(self, compiled: Any) -> float:
        """Return the longest time for the allowed tokens of one step, in a random answer.

        Raises:
            FormError: no token is allowed at a step, so that no answer has the form.
        """
        matcher = self._xgrammar.GrammarMatcher(compiled)
        mask = self._xgrammar.allocate_token_bitmask(1, self._vocab_size)
        bits = mask[0].numpy().view(np.uint8)
        rng = np.random.default_rng(0)
        slowest = 0.0
        for step in range(NUM_MASKS):
            if matcher.is_terminated():
                break
            began = time.process_time()
            matcher.fill_next_token_bitmask(mask)
            slowest = max(slowest, time.process_time() - began)
            allowed = np.flatnonzero(np.unpackbits(bits, bitorder="little"))
            if not len(allowed):
                raise FormError(
                    f"expected a form that an answer can have, got none at token {step}"
                )
            matcher.accept_token(int(rng.choice(allowed)))
        return slowest
