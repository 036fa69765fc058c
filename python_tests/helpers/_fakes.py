"""A tiny model, prompts for it, and rollouts that sample from the model itself: no engine."""

import asyncio
import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from skyrl_fast.config import Config
from skyrl_fast.rollout.activity import ActivityBoard
from skyrl_fast.rollout.trajectory import Step, Trajectory
from skyrl_fast.train.data.prompts import Prompt
from skyrl_fast.train.model.policy import Policy

VOCABULARY = 16
FIRST_WORD = 4  # ids below: pad, start, end, observation
OBSERVATION = 3
TURNS = 2


class FakeTokenizer:
    """Numbers as words."""

    pad_token_id = 0

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(str(i) for i in ids)

    def save_pretrained(self, folder: Path) -> None:
        Path(folder).mkdir(exist_ok=True)
        (Path(folder) / "tokenizer.txt").write_text("numbers")


def tiny_model(seed: int = 0, *, dtype: torch.dtype = torch.float32, tied: bool = False) -> Any:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
    )
    model = Qwen2ForCausalLM(config).to(dtype)
    for parameter in model.parameters():  # larger than the default: logprobs that differ
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    return model


def make_prompts(number: int, prefix: str = "") -> list[Prompt]:
    return [
        Prompt(f"{prefix}{i}", [{"role": "user", "content": str(FIRST_WORD + i % 8)}], "fake", {})
        for i in range(number)
    ]


def write_prompts(path: Path, number: int) -> str:
    rows = [{"prompt": prompt.messages, "env_class": "fake"} for prompt in make_prompts(number)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def start_of(prompt: Prompt) -> list[int]:
    """Return the ids of a prompt: the start, and the word."""
    return [1, int(prompt.messages[0]["content"])]


def seeded(key: str) -> torch.Generator:
    return torch.Generator().manual_seed(int.from_bytes(key.encode()[-7:], "big"))


class FakeRollouts:
    """Two turns of two tokens each; reward 1 if the second turn says the prompt's word.

    Training asks for each group by itself; `calls` has them by batches of prompts.
    Sampling seeds derive from (seed, step, phase, uid, repetition, turn), as the real ones do.
    """

    def __init__(self, config: Config, model: Any) -> None:
        self.config = config
        self.model = copy.deepcopy(model)
        self.version = -1
        self.board = ActivityBoard()
        self.calls: list[tuple[int, str, list[str]]] = []
        self.closed = False

    async def generate(
        self, prompts: Sequence[Prompt], *, step: int, phase: str
    ) -> list[Trajectory]:
        if self._note(step, phase, [prompt.uid for prompt in prompts]):
            await self.before_batch(step, phase)
        generator = self.config.generator
        samples = (
            generator.n_samples_per_prompt
            if phase == "train"
            else generator.eval_n_samples_per_prompt
        )
        rows = [(prompt, repetition) for prompt in prompts for repetition in range(samples)]
        turns = self._turns(rows, step, phase)
        return [
            self.build_trajectory(prompt, repetition, phase, answers)
            for (prompt, repetition), answers in zip(rows, turns, strict=True)
        ]

    async def before_batch(self, step: int, phase: str) -> None:
        """Hook for tests, called before each batch."""

    def _note(self, step: int, phase: str, uids: list[str]) -> bool:
        """Record the call; groups of one step's batch are one call. Return whether it is new."""
        if phase == "train" and self.calls and self.calls[-1][:2] == (step, phase):
            batch = self.calls[-1][2]
            if len(batch) < self.config.trainer.train_batch_size:
                batch += uids
                return False
        self.calls.append((step, phase, uids))
        return True

    async def sleep(self, policy: Policy) -> None:
        pass

    async def update_weights(self, policy: Policy, *, version: int) -> dict[str, float]:
        self.model.load_state_dict(
            dict(policy.named_weights()), strict=False
        )  # tied weights occur once
        self.version = version
        return {"sync/logprob_abs_diff_max": 0.0}

    async def wait_for_fault(self) -> None:
        await asyncio.Event().wait()

    async def repair(self, policy: Policy | None, *, version: int) -> None:
        raise AssertionError("nothing is broken")

    def activity(self, uids: Sequence[str]) -> list[str]:
        return []

    def faults(self) -> dict[str, float]:
        return {}

    async def close(self) -> None:
        self.closed = True

    def _turns(
        self, rows: list[tuple[Prompt, int]], step: int, phase: str
    ) -> list[list[tuple[list[int], list[float]]]]:
        """Return tokens and logprobs of each row's turns; each position is one forward pass."""
        turns: list[list[tuple[list[int], list[float]]]] = [[] for _ in rows]
        contexts = [start_of(prompt) for prompt, _ in rows]
        for turn in range(TURNS):
            randoms = [
                seeded(f"{self.config.trainer.seed} {step} {phase} {prompt.uid} {number} {turn}")
                for prompt, number in rows
            ]
            answers: list[tuple[list[int], list[float]]] = [([], []) for _ in rows]
            for _ in range(2):
                known = [
                    (*one, *tokens) for one, (tokens, _) in zip(contexts, answers, strict=True)
                ]
                of_context = self._logprobs(sorted(set(known)))
                for context, random, (tokens, logprobs) in zip(
                    known, randoms, answers, strict=True
                ):
                    values = of_context[context]
                    tokens.append(int(torch.multinomial(values.exp(), 1, generator=random)))
                    logprobs.append(float(values[tokens[-1]]))
            for row, answer in enumerate(answers):
                turns[row].append(answer)
                contexts[row] = [*contexts[row], *answer[0], OBSERVATION]
        return turns

    @torch.no_grad()
    def _logprobs(self, contexts: list[tuple[int, ...]]) -> dict[tuple[int, ...], torch.Tensor]:
        """Return (VOCABULARY,) of the token after each context; all have the same length."""
        logits = self.model(input_ids=torch.tensor(contexts), use_cache=False).logits[:, -1]
        values = torch.log_softmax(logits.float().nan_to_num(), -1)
        return dict(zip(contexts, values, strict=True))

    def build_trajectory(
        self,
        prompt: Prompt,
        repetition: int,
        phase: str,
        turns: list[tuple[list[int], list[float]]],
    ) -> Trajectory:
        word, context = int(prompt.messages[0]["content"]), start_of(prompt)
        steps: list[Step] = []
        for turn, (tokens, logprobs) in enumerate(turns):
            last = turn == TURNS - 1
            steps.append(
                Step(
                    prompt_token_ids=list(context),
                    response_ids=tokens,
                    loss_mask=[1] * len(tokens),
                    rollout_logprobs=logprobs,
                    reward=float(word in tokens) if last else 0.0,
                    stop_reason="stop",
                    policy_version=self.version,
                    text=" ".join(map(str, tokens)),
                    observation="" if last else "go on",
                    llm_seconds=0.03,
                    env_seconds=0.01,
                )
            )
            context = [*context, *tokens, OBSERVATION]
        return Trajectory(
            uid=prompt.uid,
            repetition_id=repetition,
            steps=steps,
            stop_reason="stop",
            env_class="fake",
            env_metrics={},
            seconds=0.1,
            phase=phase,
            data_source=prompt.data_source,
        )
