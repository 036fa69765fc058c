"""Row lengths with long passages: one set of scripted rollouts in three forms.

    python examples/search_r1/row_shapes.py                     prints the table
    python examples/search_r1/row_shapes.py --filler-words 300  other passages

The environment, the retrieval server and the agent loop are the real ones; only the model is a
script, so that nothing is sampled and the table is the same everywhere. The limits are those of
`qwen2.5_3b.yaml`. Lengths are in words of the tiny tokenizer.

old form: a response is the model's output and the observation after it, and before each turn the
length of the previous turn is checked. gen-only: a response is the model's output, and this turn's
prompt is checked. merged: gen-only steps whose context only grew, merged.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))  # this file may be started from anywhere

from examples.search_r1 import make_data as data  # noqa: E402
from examples.search_r1.run import LONG_MAX_LENGTH, serve  # noqa: E402
from examples.search_r1.warm_start import search_tokenizer  # noqa: E402
from examples.tiny_model.jsonl import read_jsonl, write_jsonl  # noqa: E402
from skyrl_fast.config import EnvironmentConfig, GeneratorConfig, SamplingParams, SkyRLGymConfig  # noqa: E402
from skyrl_fast.config.loading import load_config  # noqa: E402
from skyrl_fast.rollout.chat_template import ChatTemplate  # noqa: E402
from skyrl_fast.rollout.context import begin_context  # noqa: E402
from skyrl_fast.rollout.engine.protocol import Generation  # noqa: E402
from skyrl_fast.rollout.env.factory import EnvFactory  # noqa: E402
from skyrl_fast.rollout.groups import rollout  # noqa: E402
from skyrl_fast.train.data.prompts import Prompt, load_prompts  # noqa: E402

FILLER_WORDS = 600  # after each fact, on average: three passages are thousands of tokens
NUM_PROMPTS = 32
THOUGHT_WORDS = (20, 480)  # least and most of one turn


class ScriptedEngine:
    """Returns random thoughts, then a search or an answer: the same at the same place of a run."""

    def __init__(self, tokenizer: Any, max_turns: int) -> None:
        self._tokenizer = tokenizer
        self._max_turns = max_turns
        self._turns: Counter[str] = Counter()

    async def generate(
        self, prompt_token_ids: Sequence[int], sampling: Any, *, session_id: str, **_: Any
    ) -> Generation:
        """Return one turn of this trajectory; see `Engine.generate`."""
        rng = random.Random(f"{session_id}-{self._turns[session_id]}")
        num_searches = random.Random(session_id).randint(1, self._max_turns)
        thought = " ".join(rng.choices(data.FILLER_WORDS, k=rng.randint(*THOUGHT_WORDS)))
        if self._turns[session_id] < num_searches:
            query, tag = f"{rng.choice(list(data.TOPICS))} {rng.choice(data.CITIES)}", "search"
        else:
            query, tag = rng.choice(data.CITIES), "answer"
        self._turns[session_id] += 1
        text = f"<think> {thought} </think> <{tag}> {query} </{tag}>"
        ids = self._tokenizer.encode(text, add_special_tokens=False)
        return Generation(ids, [-1.0] * len(ids), "stop", f"</{tag}>")


@dataclass(frozen=True, slots=True)
class Shape:
    """The size of the batch in one form of the rollouts.

    Args:
        form: its name.
        num_rows: rows of the batch.
        longest: the batch's padded width.
        num_tokens: of all rows, without padding.
        num_trained: tokens with loss mask 1.
    """

    form: str
    num_rows: int
    longest: int
    num_tokens: int
    num_trained: int

    @property
    def num_cells(self) -> int:
        """Tokens and padding."""
        return self.num_rows * self.longest


def shape_of(form: str, rows: Sequence[tuple[int, int, int]]) -> Shape:
    """Return the shape of rows given as (prompt length, response length, trained tokens).

    Example:
        >>> shape_of("a", [(3, 2, 2), (6, 4, 1)])
        Shape(form='a', num_rows=2, longest=10, num_tokens=15, num_trained=3)
    """
    lengths = [prompt + response for prompt, response, _ in rows]
    trained = sum(row[2] for row in rows)
    return Shape(form, len(rows), max(lengths), sum(lengths), trained)


async def old_form(
    prompt: Prompt,
    repetition: int,
    engine: ScriptedEngine,
    tokenizer: Any,
    environments: EnvFactory,
    config: GeneratorConfig,
) -> list[tuple[int, int, int]]:
    """Return a trajectory's rows with observations in the responses, checked one turn late."""
    extras = {**prompt.env_extras, "max_turns": config.max_turns}
    env = await environments.make(prompt.env_class, extras)
    template = ChatTemplate(tokenizer)
    context = begin_context("append", template, await env.init(prompt.messages))
    rows: list[tuple[int, int, int]] = []
    checked = len(context.prompt_token_ids())
    done = False
    while not done and checked <= config.max_input_length:
        checked = before = len(context.prompt_token_ids())
        session = f"train-0-{prompt.uid}-{repetition}-0"
        generation = await engine.generate([], config.sampling_params, session_id=session)
        text = tokenizer.decode(generation.token_ids)
        answer = await env.step(text)
        message = {"role": "assistant", "content": text}
        ended = [*generation.token_ids, tokenizer.eos_token_id]
        context.add_response(ended, message, replaced=False)
        if not answer.done:
            context.add_observation(answer.messages)
        done = answer.done
        response = len(context.prompt_token_ids()) - before
        rows.append((before, response, len(generation.token_ids)))
    await env.close()
    return rows


async def all_forms(
    prompts: Sequence[Prompt], tokenizer: Any, settings: Any, search_url: str
) -> list[Shape]:
    """Return the table's rows."""
    from skyrl_fast import merge_stepwise_output
    from skyrl_fast.adapters.generator_output import generator_output_from_trajectories

    generator = settings.generator
    config = GeneratorConfig(
        n_samples_per_prompt=generator.n_samples_per_prompt,
        max_turns=generator.max_turns,
        max_input_length=generator.max_input_length,
        sampling_params=SamplingParams(generator.sampling_params.max_generate_length),
        context="append",
    )
    search = {**settings.environment.skyrl_gym.search, "search_url": search_url}
    environments = EnvFactory(EnvironmentConfig(skyrl_gym=SkyRLGymConfig(search=search)))

    def engine() -> ScriptedEngine:
        return ScriptedEngine(tokenizer, config.max_turns)

    scripted = engine()
    old = await asyncio.gather(
        *(
            old_form(prompt, repetition, scripted, tokenizer, environments, config)
            for prompt in prompts
            for repetition in range(config.n_samples_per_prompt)
        )
    )
    trajectories = await rollout(
        prompts,
        engine(),
        tokenizer,
        environments,
        config,
        phase="train",
        policy_version=0,
        seed=0,
    )
    await environments.close()
    steps = generator_output_from_trajectories(trajectories)
    return [
        shape_of("old form", [row for rows in old for row in rows]),
        shape_of("gen-only", _rows_of(steps)),
        shape_of("merged", _rows_of(merge_stepwise_output(steps))),
    ]


def _rows_of(output: Any) -> list[tuple[int, int, int]]:
    fields = ("prompt_token_ids", "response_ids", "loss_masks")
    columns = zip(*(output[field] for field in fields), strict=True)
    return [(len(prompt), len(response), sum(mask)) for prompt, response, mask in columns]


def table(shapes: Sequence[Shape], limit: int) -> str:
    """Return the shapes as a Markdown table; `limit` is the longest row allowed."""
    lines = [
        f"| form | rows | padded length (at most {limit:,}) | tokens | padded cells | trained |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for s in shapes:
        numbers = (s.num_rows, s.longest, s.num_tokens, s.num_cells, s.num_trained)
        lines.append(f"| {s.form} | " + " | ".join(f"{number:,}" for number in numbers) + " |")
    return "\n".join(lines)


def measure(
    folder: Path, *, filler_words: int = FILLER_WORDS, num_prompts: int = NUM_PROMPTS
) -> tuple[list[Shape], int]:
    """Create corpus and prompts in the folder, and roll out.

    Returns:
        The shapes, and the longest row allowed.
    """
    data.make_data(folder / "data", filler_words=filler_words, num_demonstrations=0)
    rows = read_jsonl(folder / "data/train.jsonl")[:num_prompts]
    write_jsonl(folder / "data/prompts.jsonl", rows)
    prompts = load_prompts([str(folder / "data/prompts.jsonl")], default_env_class="search")
    settings = load_config(HERE / "qwen2.5_3b.yaml")
    generator = settings.generator
    with serve(folder) as (setting,):
        url = setting.partition("=")[2]
        shapes = asyncio.run(
            all_forms(prompts, search_tokenizer([], max_length=LONG_MAX_LENGTH), settings, url)
        )
    return shapes, generator.max_input_length + generator.sampling_params.max_generate_length


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--filler-words", type=int, default=FILLER_WORDS, help="mean words after each fact"
    )
    parser.add_argument("--num-prompts", type=int, default=NUM_PROMPTS, help="prompts to roll out")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        shapes, limit = measure(
            Path(folder), filler_words=options.filler_words, num_prompts=options.num_prompts
        )
    print(table(shapes, limit))


if __name__ == "__main__":
    main()
