"""The quickstart with models of other layers on real vLLM: it learns, and trees equal rows."""

import asyncio
import copy
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("skyrl_gym")

from examples.quickstart.make_data import make_data
from examples.quickstart.warm_start import warm_start
from examples.tiny_model.model import VOCABULARY_MULTIPLE
from examples.tiny_model.recipe import make_once
from skyrl_fast.config.loading import load_config
from skyrl_fast.rollout.activity import ActivityBoard
from skyrl_fast.rollout.trajectory import Trajectory
from skyrl_fast.train.data.prompts import Prompt
from skyrl_fast.train.flow import vllm_rollouts
from skyrl_fast.train.flow.vllm_rollouts import start_rollouts
from skyrl_fast.train.model.policy import Policy
from skyrl_fast.train.output.loggers import read_metrics
from skyrl_fast.train.run import TrainResult, train_agent

CONFIG = Path(__file__).parents[2] / "examples/quickstart/config.yaml"
UPDATES = 20
STEPS = UPDATES // 2  # two mini-batches each
BEFORE, AFTER = 0.5, 0.8  # evaluation, as the quickstart promises: at most and at least
WINDOW = 32  # far below a trajectory's tokens
ROUNDING = 1e-3  # relative, after 20 updates of float32 weights: other orders of summation

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.timeout(1800),
]


def sizes(tokenizer: Any) -> dict[str, Any]:
    return {
        "vocab_size": -(-len(tokenizer) // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 32,
        "max_position_embeddings": tokenizer.model_max_length,
        "initializer_range": 0.05,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }


def windowed(tokenizer: Any, *, seed: int) -> Any:
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    torch.manual_seed(seed)
    layers = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": WINDOW}
    config = Gemma3TextConfig(**sizes(tokenizer), **layers, query_pre_attn_scalar=32)
    return Gemma3ForCausalLM(config)


def gated_delta_net(tokenizer: Any, *, seed: int) -> Any:
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    torch.manual_seed(seed)
    config = Qwen3NextConfig(
        # vLLM's model of this type has a head of its own.
        **sizes(tokenizer) | {"num_hidden_layers": 3, "tie_word_embeddings": False},
        layer_types=["linear_attention", "full_attention", "full_attention"],
        mlp_only_layers=[0, 1],  # vLLM wants experts in one layer
        num_experts=2,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=192,  # with the experts, as wide as the other layers
        # The type's own quarter is 8 of 32 numbers. With those and a narrower last layer the warm
        # start guessed whether the inspected table has the question's columns.
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10_000.0,
            "partial_rotary_factor": 1.0,
        },
        linear_num_key_heads=1,
        linear_num_value_heads=1,
        linear_key_head_dim=128,  # the one size of vLLM's kernels on a CPU
        linear_value_head_dim=128,
    )
    model = Qwen3NextForCausalLM(config)
    model.lm_head.weight.data.copy_(model.model.embed_tokens.weight)  # copying starts early
    return model


class Idle:
    """An engine that is never asked for tokens."""

    board = ActivityBoard()

    async def sleep(self, policy: Policy) -> None: ...

    async def update_weights(self, policy: Policy, *, version: int) -> dict[str, float]:
        return {}

    async def wait_for_fault(self) -> None:
        await asyncio.Event().wait()

    async def repair(self, policy: Policy | None, *, version: int) -> None: ...

    def activity(self, uids: Sequence[str]) -> list[str]:
        return []

    def faults(self) -> dict[str, float]:
        return {}

    async def close(self) -> None: ...


class Recorder:
    """Keeps what rollouts answer, and answers it again to a run without an engine."""

    def __init__(self, inner: Any, answers: dict[Any, list[Trajectory]]) -> None:
        self.inner, self.answers = inner, answers

    async def generate(
        self, prompts: Sequence[Prompt], *, step: int, phase: str
    ) -> list[Trajectory]:
        key = (step, phase, *(prompt.uid for prompt in prompts))
        if not isinstance(self.inner, Idle):
            found = await self.inner.generate(prompts, step=step, phase=phase)
            self.answers[key] = copy.deepcopy(found)
        return copy.deepcopy(self.answers[key])

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with data and models; SKYRL_FAST_QUICKSTART can name an existing one."""
    given = os.environ.get("SKYRL_FAST_QUICKSTART")
    folder = (Path(given) if given else tmp_path_factory.mktemp("families")) / "quickstart"
    make_once(folder / "data", make_data)
    return folder


@pytest.mark.parametrize(
    ("make", "engine_dtype"),
    [
        (windowed, "float32"),
        (gated_delta_net, "bfloat16"),  # its kernels have no float32 on a CPU
    ],
)
def test_it_learns_and_trees_equal_rows(
    make: Callable[..., Any],
    engine_dtype: str,
    data: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(data.parent)
    model = data / make.__name__
    make_once(model, lambda path: warm_start(data / "data", path, make=make))
    answers: dict[Any, list[Trajectory]] = {}

    async def record(*arguments: Any, **options: Any) -> Recorder:
        return Recorder(await start_rollouts(*arguments, **options), answers)

    async def replay(*arguments: Any) -> Recorder:
        return Recorder(Idle(), answers)

    def run(
        layout: str, *overrides: str, **options: Any
    ) -> tuple[TrainResult, list[dict[str, Any]]]:
        own = [
            f"trainer.policy.model.path={model}",
            f"trainer.row_layout={layout}",
            "trainer.plot=false",
        ]
        own += [f"generator.inference_engine.model_dtype={engine_dtype}"]
        own += [f"trainer.run_path={data}/{make.__name__}_{layout}", "trainer.logger=[jsonl]"]
        result = train_agent(load_config(str(CONFIG), [*own, *overrides]), **options)
        steps = [row for row in read_metrics(result.metrics) if "policy/loss" in row]
        return result, steps

    monkeypatch.setattr(vllm_rollouts, "start_rollouts", record)
    result, as_trees = run("tree")
    no_eval = ["trainer.eval_interval=-1", "trainer.eval_before_train=false"]
    short = [f"trainer.max_training_steps={STEPS}", "trainer.ckpt_interval=-1"]
    _, as_rows = run("sequence", *no_eval, *short, make_rollouts=replay)

    print(make.__name__, dict(result.evaluations))
    assert len(as_rows) == STEPS
    for name in ("policy/loss", "policy/grad_norm", "policy/policy_entropy", "policy/ratio_max"):
        trees, rows = ([row[name] for row in steps[:STEPS]] for steps in (as_trees, as_rows))
        print(name, [f"{abs(a - b):.1e}" for a, b in zip(trees, rows, strict=True)])
        assert trees == pytest.approx(rows, rel=ROUNDING, abs=1e-5)
    assert all(row["policy/tree_group_share"] == 1 for row in as_trees)
    assert all(row["policy/tree_group_share"] == 0 for row in as_rows)
    assert result.before is not None and result.before <= BEFORE
    assert result.after is not None and result.after >= AFTER
