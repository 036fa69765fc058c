"""Mode "fixed" installed in a real SkyRL: what each rule changes, compared with SkyRL."""

import asyncio
from collections.abc import Iterator
from typing import Any
from unittest.mock import AsyncMock, MagicMock, patch

import numpy as np
import pytest

from skyrl_fast.integrations.skyrl.replacement import find, version_label
from skyrl_fast.integrations.skyrl.rules import RULES, UPDATE

pytestmark = [pytest.mark.peers, pytest.mark.spec("dropin.fixed-mode")]
EOS, LIMIT = 4, 24


@pytest.fixture(autouse=True)
def put_back() -> Iterator[None]:
    pytest.importorskip("skyrl.train.trainer", reason="SkyRL is not installed")
    from skyrl_fast.integrations.skyrl import uninstall

    uninstall()
    yield
    uninstall()


def both(rule: str, work: Any) -> tuple[Any, Any]:
    """Return SkyRL's result without and with the rule; errors are results too."""
    from skyrl_fast.integrations import skyrl as ours

    results = []
    for installed in (False, True):
        if installed:
            report = ours.install("fixed", rules=[rule], ray_workers=False)
            assert any(row.why == f"rules: {rule}" for row in report.rows), rule
        try:
            results.append(work())
        except Exception as error:
            results.append(error)
    return results[0], results[1]


class Env:
    """Each observation is longer than the one before."""

    def __init__(self, last: int) -> None:
        self.turns, self.last = 0, last

    def init(self, prompt: Any) -> Any:
        return prompt, {}

    def step(self, action: str) -> Any:
        self.turns += 1
        seen = (
            [] if self.turns == self.last else [{"role": "user", "content": "x" * 4 * self.turns}]
        )
        return {
            "observations": seen,
            "reward": 0.5,
            "done": self.turns == self.last,
            "metadata": {},
        }

    def get_metrics(self) -> dict:
        return {}

    def close(self) -> None:
        return None


TOP_K = 3


def agent_loop(
    *, step_wise: bool, routes: bool = False, support: bool = False, limit: int = LIMIT
) -> tuple[Any, list[int]]:
    """Run SkyRL's generator with a scripted engine; return its output and the prompts' lengths.

    With routes it is a conversation of turns, and each token's expert is the number of the call.
    With support, each sampled token has the ids 1, 2, 3.
    """
    from skyrl.train.config import ChatTemplateConfig, GeneratorConfig
    from skyrl.train.generators.base import TrajectoryID
    from skyrl.train.generators.skyrl_gym_generator import SkyRLGymGenerator

    lengths: list[int] = []

    async def generate(engine_input: Any, model: Any = None) -> Any:
        lengths.append(len(engine_input["prompt_token_ids"][0]))
        ids = [10, 11, 12, EOS] if step_wise else [10, 11, 12]
        output = {"responses": ["step"], "stop_reasons": ["stop"], "response_logprobs": None,
                  "response_ids": [ids]}  # fmt: skip
        if support:
            output["rollout_sample_support"] = [[[1, 2, 3]] * len(ids)]
        if routes:
            experts = np.full((lengths[-1] + len(ids), 1, 1), len(lengths), dtype=np.uint8)
            output["rollout_expert_indices"] = [experts]
        return output

    def template(messages: Any, **kwargs: Any) -> Any:
        text = "".join(message.get("content", "") for message in messages)
        return [200] * max(2, len(text)) if kwargs.get("tokenize", True) else text

    tokenizer = MagicMock(eos_token_id=EOS, eos_token="e")
    tokenizer.apply_chat_template.side_effect = template
    tokenizer.encode.side_effect = lambda text, **_: [7] * len(text)
    cfg = GeneratorConfig()
    cfg.sampling_params.max_generate_length, cfg.sampling_params.logprobs = 50, None
    cfg.max_input_length, cfg.batched, cfg.max_turns = 1000 if routes else limit, False, 10
    if support:
        cfg.inference_engine.enable_return_sample_support_set = True
        cfg.sampling_params.top_k = TOP_K
    cfg.step_wise_trajectories = step_wise
    cfg.use_conversation_multi_turn = step_wise or routes
    cfg.inference_engine.enable_return_routed_experts = routes
    cfg.chat_template = ChatTemplateConfig(source="name", name_or_path=None)
    engine = MagicMock(generate=AsyncMock(side_effect=generate), finish_session=AsyncMock())
    gym = MagicMock(max_env_workers=0)
    with patch("skyrl_gym.make", side_effect=lambda *_, **__: Env(4 if step_wise else 2)):
        generator = SkyRLGymGenerator(
            generator_cfg=cfg, skyrl_gym_cfg=gym, inference_engine_client=engine,
            tokenizer=tokenizer,
        )  # fmt: skip
        generator.base_conversation_token_ids = []
        output = asyncio.run(
            generator.generate(
                {
                    "prompts": [[{"role": "user", "content": "Q1?"}]],
                    "env_extras": [{}],
                    "env_classes": ["gsm8k"],
                    "trajectory_ids": [TrajectoryID("a", 0)],
                }
            )
        )
    return output, lengths


def test_every_rule_replaces_a_function_of_this_skyrl() -> None:
    """Or says why not: what each does is tested in test_skyrl_fixed.py."""
    from skyrl_fast.integrations import skyrl as ours

    for rule in RULES:
        report = ours.install("fixed", rules=[rule.name], ray_workers=False)
        (why,) = (row.why for row in report.rows if row.name == rule.target.name)
        # SkyRL 0.4.0 follows this rule itself, and that of 0.3.0 is another function.
        kept = why and rule.name == "routes_append" and f"rules: {rule.name}" not in why
        assert kept or why == f"rules: {rule.name}", rule.name
        ours.uninstall()


def test_length_check() -> None:
    (_, stock), (output, sent) = both("length_check", lambda: agent_loop(step_wise=True))
    assert max(stock) > LIMIT >= max(sent)
    assert sent == stock[: len(sent)] and output["stop_reasons"][-1] == "length"
    assert len(output["response_ids"]) == len(sent)


def test_gen_only_rows() -> None:
    (stock, _), (output, _) = both("gen_only_rows", lambda: agent_loop(step_wise=True))
    assert all(row == [10, 11, 12, EOS] for row in output["response_ids"])
    assert stock["prompt_token_ids"] == output["prompt_token_ids"]
    assert any(len(row) > 4 for row in stock["response_ids"])


@pytest.mark.parametrize("limit", [LIMIT, 1])
def test_agent_loop_keeps_the_support_of_sampled_tokens(limit: int) -> None:
    from skyrl.train.config import InferenceEngineConfig

    if not hasattr(InferenceEngineConfig(), "enable_return_sample_support_set"):
        pytest.skip("this SkyRL records no support")
    from skyrl_fast.integrations import skyrl as ours

    ours.install("fixed", ray_workers=False)
    output, sent = agent_loop(step_wise=True, support=True, limit=limit)
    want = [[[1, 2, 3]] * 4] * len(sent) if sent else [[[-1] * TOP_K]]
    assert [rows.tolist() for rows in output["rollout_sample_support"]] == want
    assert list(map(len, output["response_ids"])) == [len(rows) for rows in want]


def test_appended_eos() -> None:
    (stock, _), (output, _) = both("appended_eos", lambda: agent_loop(step_wise=False))
    assert stock["response_ids"] == output["response_ids"]
    assert (stock["response_ids"][0][-1], stock["loss_masks"][0][-1]) == (EOS, 1)
    assert output["loss_masks"][0][:-1] == stock["loss_masks"][0][:-1]
    assert output["loss_masks"][0][-1] == 0


def test_routes_append() -> None:
    found = find(UPDATE)
    if found is None or version_label(UPDATE, *found) is None:
        pytest.skip("this SkyRL keeps its own method")
    (stock, _), (output, sent) = both(
        "routes_append", lambda: agent_loop(step_wise=False, routes=True)
    )
    first = sent[0] + 3  # the first turn's prompt and response
    stock_routes, routes = (
        np.asarray(result["rollout_expert_indices"][0])[:, 0, 0].tolist()
        for result in (stock, output)
    )
    assert stock["response_ids"] == output["response_ids"] and len(sent) == 2
    assert stock_routes == [2] * (sent[1] + 3)
    assert routes == [1] * first + [2] * (sent[1] + 3 - first)


EQUAL, DIFFERENT = [[0.0, 1.0], [0.0, 1.0]], [[0.0, 1.0], [0.0]]
