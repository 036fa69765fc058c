"""The recipes: data, configurations, and that a perfect agent is always rewarded."""

import os
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

skyrl_gym = pytest.importorskip("skyrl_gym")
pytest.importorskip("transformers")
pytest.importorskip("bm25s")
pytest.importorskip("fastapi")

from omegaconf import OmegaConf  # noqa: E402

from examples.gsm8k import make_data as gsm8k  # noqa: E402
from examples.search_r1 import make_data as search  # noqa: E402
from examples.search_r1 import row_shapes  # noqa: E402
from examples.search_r1.run import serve  # noqa: E402
from examples.search_r1.warm_start import search_tokenizer  # noqa: E402
from examples.smollm import make_data as smollm  # noqa: E402
from examples.smollm.agent import solve  # noqa: E402
from examples.tiny_model.jsonl import read_jsonl  # noqa: E402
from examples.tiny_model.model import make_tokenizer  # noqa: E402
from skyrl_fast.config.loading import load_config  # noqa: E402
from skyrl_fast.config.modes import EnginePlace, EngineWeights  # noqa: E402

EXAMPLES = Path(__file__).parents[2] / "examples"
CLUSTER = EXAMPLES / "cluster"  # files of Ray and Kubernetes
CONFIGS = sorted(path for path in EXAMPLES.glob("*/*.yaml") if CLUSTER not in path.parents)
OVERLAYS = ("cluster.yaml", "eight_gpus.yaml", "lora.yaml", "policies.yaml", "weights.yaml")
WITH_ADAPTER = {
    "bfcl/config.yaml",
    "bfcl/qwen3_4b.yaml",
    "gateway/policies.yaml",
    "quickstart/lora.yaml",
    "reasoning_gym/config.yaml",
    "smollm/lora.yaml",
}
PUBLISHED = {
    "gsm8k/qwen2.5_1.5b.yaml": ("Qwen/Qwen2.5-1.5B-Instruct", 1024, 256, 5, 1, 1024, "regular"),
    "gsm8k/multi_turn_qwen2.5_0.5b.yaml": (
        *("Qwen/Qwen2.5-0.5B-Instruct", 256, 128, 5, 5, 1024, "regular"),
    ),
    "text2sql/qwen2.5_coder_7b.yaml": (
        *("Qwen/Qwen2.5-Coder-7B-Instruct", 256, 256, 5, 6, 3000, "dual_clip"),
    ),
    "text2sql/qwen3_4b.yaml": ("Qwen/Qwen3-4B", 64, 64, 5, 6, 3000, "dual_clip"),
    "search_r1/qwen2.5_3b.yaml": ("Qwen/Qwen2.5-3B-Instruct", 512, 256, 5, 4, 500, "regular"),
}


def files(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


# --- configurations ----------------------------------------------------------------------------


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: str(p.relative_to(EXAMPLES)))
def test_every_configuration_is_valid(path: Path) -> None:
    base = path.with_name("config.yaml")
    if path.parent.name == "gateway":  # variants of the quickstart
        base = EXAMPLES / "quickstart/config.yaml"
    if path.name == "eight_gpus.yaml":
        base = path.with_name("qwen3_4b.yaml")
    config = load_config(base, [str(path)]) if path.name in OVERLAYS else load_config(path)
    assert config.trainer.run_path
    assert config.trains_adapter == (str(path.relative_to(EXAMPLES)) in WITH_ADAPTER)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_settings_with_an_adapter(name: str) -> None:
    complete = load_config(EXAMPLES / name)
    config = load_config(EXAMPLES / name, [str(EXAMPLES / "lora.yaml")])
    assert config.engine_weights is EngineWeights.ADAPTER
    rates = [one.trainer.policy.optimizer_config.lr for one in (complete, config)]
    assert rates[1] == pytest.approx(10 * rates[0])


@pytest.mark.spec("update.engine-nodes")
def test_the_quickstarts_cluster_has_two_ranks_and_two_engines() -> None:
    folder = EXAMPLES / "quickstart"
    config = load_config(folder / "config.yaml", [str(folder / "cluster.yaml")])
    assert config.trainer.placement.num_ranks == 2
    assert config.engine_place is EnginePlace.CLUSTER
    assert config.generator.inference_engine.num_engines == 2
    assert (
        config.trainer.train_batch_size
        == load_config(folder / "config.yaml").trainer.train_batch_size
    )


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_settings(name: str) -> None:
    config = load_config(EXAMPLES / name)
    trainer, generator = config.trainer, config.generator
    assert PUBLISHED[name] == (
        trainer.policy.model.path,
        trainer.train_batch_size,
        trainer.policy_mini_batch_size,
        generator.n_samples_per_prompt,
        generator.max_turns,
        generator.sampling_params.max_generate_length,
        trainer.algorithm.policy_loss_type,
    )
    assert trainer.policy.optimizer_config.lr == 1e-6


def test_search_r1_uses_token_tis_with_cap_two() -> None:
    correction = load_config(
        EXAMPLES / "search_r1/qwen2.5_3b.yaml"
    ).trainer.algorithm.off_policy_correction
    assert (correction.tis_ratio_type, correction.token_tis_ratio_clip_high) == ("token", 2.0)


def test_offline_settings_differ_from_published_ones_only_in_size() -> None:
    for offline, published in (
        ("gsm8k/offline.yaml", "gsm8k/qwen2.5_1.5b.yaml"),
        ("text2sql/offline.yaml", "text2sql/qwen2.5_coder_7b.yaml"),
        ("text2sql/offline_thinking.yaml", "text2sql/qwen3_4b.yaml"),
        ("search_r1/offline.yaml", "search_r1/qwen2.5_3b.yaml"),
    ):
        one, other = load_config(EXAMPLES / offline), load_config(EXAMPLES / published)
        for key in ("advantage_estimator", "policy_loss_type", "use_kl_loss"):
            assert getattr(one.trainer.algorithm, key) == getattr(other.trainer.algorithm, key)
        assert one.generator.context == other.generator.context
        forms = {one.trainer.rows, other.trainer.rows}
        assert len(forms) == 1 or forms == {"step", "merged"}
        assert one.generator.sampling_params.stop == other.generator.sampling_params.stop
        assert one.environment.env_class == other.environment.env_class


# --- smollm ------------------------------------------------------------------------------------


def test_smollm_rewards_the_sum_as_the_last_number(tmp_path: Path, tiny_tokenizer: Any) -> None:
    pytest.importorskip("openai")
    from _gateway import played
    from fake_envs import FakePrompt, says

    for name in ("one", "same"):
        smollm.make_data(tmp_path / name, seed=0)
    smollm.make_data(tmp_path / "other", seed=1)
    assert files(tmp_path / "one") == files(tmp_path / "same") != files(tmp_path / "other")
    train, held_out = (read_jsonl(tmp_path / "one" / f"{n}.jsonl") for n in ("train", "eval"))
    questions = {row["prompt"][0]["content"] for row in train}
    assert len(questions) == len(train) and len(train) + len(held_out) == 21 * 21
    assert not questions & {row["prompt"][0]["content"] for row in held_out}
    row = {"prompt": [{"role": "user", "content": "What is 7 + 5?"}], "answer": "12"}
    for text, reward in (("7 + 5 = 12.", 1.0), ("12, not 13", 0.0), ("twelve", 0.0)):
        prompt = FakePrompt("p", row["prompt"], env_extras={"answer": "12"})
        answer = says(tiny_tokenizer, text)
        out = played(solve, tiny_tokenizer, prompts=[prompt], answer=lambda call, n, a=answer: a)
        assert [step.reward for step in out.only.steps] == [reward]


# --- gsm8k -------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["gsm8k", "gsm8k_multi_turn"])
def problems(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp(request.param)
    gsm8k.make_data(
        folder, env_class=request.param, num_train=40, num_eval=20, num_demonstrations=400
    )
    return request.param, folder


def test_spin_count_is_set_before_torch_is_imported(tmp_path: Path) -> None:
    program = (
        "import os, sys\n"
        "from pathlib import Path\n"
        "from examples.tiny_model.recipe import Recipe, main\n"
        "class FirstImport:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'torch':\n"
        "            print(os.environ.get('GOMP_SPINCOUNT'), 'torch' in sys.modules)\n"
        "            raise SystemExit\n"
        "sys.meta_path.insert(0, FirstImport())\n"
        "config = Path('examples/quickstart/config.yaml')\n"
        "recipe = Recipe(Path('any'), config, lambda folder: __import__('torch'))\n"
        "main({'any': recipe}, '', ['--base', sys.argv[1]])"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    for given, seen in ((None, "2000"), ("77", "77")):
        environment = {k: v for k, v in os.environ.items() if k != "GOMP_SPINCOUNT"}
        environment |= {"GOMP_SPINCOUNT": given} if given else {}
        out = subprocess.check_output(command, cwd=EXAMPLES.parent, env=environment, text=True)
        assert out.split() == [seen, "False"]


def test_gsm8k_same_seed_same_files(problems: Any, tmp_path: Path) -> None:
    env_class, folder = problems
    sizes = {"num_train": 40, "num_eval": 20, "num_demonstrations": 400}
    gsm8k.make_data(tmp_path / "same", env_class=env_class, **sizes)
    gsm8k.make_data(tmp_path / "other", env_class=env_class, seed=1, **sizes)
    assert files(tmp_path / "same") == files(folder)
    assert all(files(tmp_path / "other")[name] != data for name, data in files(folder).items())


def test_gsm8k_eval_is_held_out(problems: Any) -> None:
    _, folder = problems
    asked = {
        name: {row["prompt"][0]["content"] for row in read_jsonl(folder / f"{name}.jsonl")}
        for name in ("train", "eval")
    }
    demonstrated = {c[0]["content"] for c in read_jsonl(folder / "demonstrations.jsonl")}
    assert (len(asked["train"]), len(asked["eval"])) == (40, 20)
    assert not asked["eval"] & (asked["train"] | demonstrated)


def test_gsm8k_problem_by_hand() -> None:
    problem = gsm8k.Problem("Ida", "nuts", 7, (("buys", 4), ("eats", 3)))
    assert problem.answer == 8
    assert (
        problem.text
        == "Ida has 7 nuts. Ida buys 4 nuts. Ida eats 3 nuts. How many nuts does Ida have now?"
    )
    rng = random.Random(0)
    assert gsm8k.demonstrate(rng, problem, gsm8k.PERFECT) == ("7 + 4 = 11 ; 11 - 3 = 8 ; #### 8", 8)
    assert gsm8k.demonstrate(rng, problem, gsm8k.PERFECT, brief=True) == ("#### 8", 8)
    always = gsm8k.Carelessness(1, 1, 1)
    assert gsm8k.demonstrate(rng, problem, always) == ("7 + 4 = 11", None)


def test_gsm8k_reference_answer_is_rewarded(problems: Any) -> None:
    env_class, folder = problems
    for row in read_jsonl(folder / "train.jsonl"):
        env = skyrl_gym.make(env_class, env_config={}, extras={**row, "max_turns": 3})
        env.init(row["prompt"])
        output = env.step(row["extra_info"]["answer"])
        assert (output["reward"], output["done"]) == (1.0, True)


def test_gsm8k_demonstrations_are_valid_but_imperfect(problems: Any) -> None:
    env_class, folder = problems
    chats = read_jsonl(folder / "demonstrations.jsonl")
    first = [re.findall(r"(\d+) ([+-]) (\d+) = (\d+)", chat[1]["content"]) for chat in chats]
    for a, sign, b, result in (step for steps in first for step in steps):
        assert int(result) == (int(a) + int(b) if sign == "+" else int(a) - int(b))
    lengths = {len(chat) for chat in chats}
    assert lengths == ({2} if env_class == "gsm8k" else {2, 4, 6})


def test_gsm8k_multi_turn_matches_the_environment() -> None:
    extras = {"reward_spec": {"ground_truth": "8"}, "max_turns": 3}
    env = skyrl_gym.make("gsm8k_multi_turn", env_config={}, extras=extras)
    answers = [env.step("#### 7")["observations"][0]["content"] for _ in range(2)]
    assert answers == [gsm8k.AGAIN, gsm8k.AT_LAST]


def test_gsm8k_tokenizer_keeps_every_answer(problems: Any) -> None:
    _, folder = problems
    chats = read_jsonl(folder / "demonstrations.jsonl")
    tokenizer = make_tokenizer(m["content"] for chat in chats for m in chat)
    for message in (m for chat in chats for m in chat if m["role"] == "assistant"):
        assert tokenizer.decode(tokenizer.encode(message["content"])) == message["content"]


# --- search_r1 ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("search_r1")
    search.make_data(folder / "data", num_demonstrations=120)
    return folder


@pytest.fixture(scope="module")
def search_url(world: Path) -> Iterator[str]:
    with serve(world) as (setting,):
        yield setting.partition("=")[2]


def search_env(row: dict[str, Any], url: str) -> Any:
    config = {"search_url": url, "topk": search.TOPK, "timeout": 5, "log_requests": False}
    extras = {**row, "max_turns": search.MAX_TURNS}
    env = skyrl_gym.make("search", env_config=OmegaConf.create(config), extras=extras)
    env.init(row["prompt"])
    return env


def test_search_same_seed_same_files(world: Path, tmp_path: Path) -> None:
    search.make_data(tmp_path / "same", num_demonstrations=120)
    search.make_data(tmp_path / "other", seed=1, num_demonstrations=120)
    assert files(tmp_path / "same") == files(world / "data")
    assert set(files(world / "data")) == {
        *("corpus.jsonl", "train.jsonl", "eval.jsonl", "demonstrations.jsonl")
    }
    for name, data in files(world / "data").items():
        assert files(tmp_path / "other")[name] != data


def test_search_eval_questions_are_held_out(world: Path) -> None:
    people = {}
    for name in ("train", "eval"):
        rows = read_jsonl(world / f"data/{name}.jsonl")
        questions = [row["extra_info"]["question"] for row in rows]
        people[name] = {question.split()[-3] for question in questions}
    assert len(people["eval"]) == search.NUM_HELD_OUT_PEOPLE
    assert not people["train"] & people["eval"]


def test_agent_that_searches_twice_is_rewarded(world: Path, search_url: str) -> None:
    for row in read_jsonl(world / "data/eval.jsonl"):
        env = search_env(row, search_url)
        topic, person = re.search(
            r"the (\w+) of .* where (\w+)", row["prompt"][1]["content"]
        ).groups()
        seen = env.step(search.tagged_turn("", "search", f"{person} works"))
        city = re.search(rf"{person} works in (\w+)", seen["observations"][0]["content"])[1]
        seen = env.step(search.tagged_turn("", "search", f"{topic} {city}"))
        fact = search.TOPICS[topic][0].format(city=city, value=r"(\w+)")
        value = re.search(fact, seen["observations"][0]["content"])[1]
        assert env.step(search.tagged_turn("", "answer", value))["reward"] == 1
        assert env.turns == 3


def test_search_demonstrations_match_the_environment(world: Path, search_url: str) -> None:
    row = read_jsonl(world / "data/train.jsonl")[0]
    seen = search_env(row, search_url).step("<search> river Genoa </search>")["observations"]
    contents = [r["contents"] for r in read_jsonl(world / "data/corpus.jsonl")]
    shown = [
        text
        for text in contents
        if text.strip().replace('"', '\\"').split("\n")[1] in seen[0]["content"]
    ]
    assert len(shown) == search.TOPK
    shown.sort(key=lambda text: seen[0]["content"].index(text.split("\n")[1]))
    assert seen[0]["content"] == search.render_observation(shown)


def test_search_tokenizer_covers_every_word(world: Path) -> None:
    tokenizer = search_tokenizer([])
    texts = [row["contents"] for row in read_jsonl(world / "data/corpus.jsonl")]
    for chat in read_jsonl(world / "data/demonstrations.jsonl"):
        texts += [message["content"] for message in chat]
        for message in chat:
            if message["role"] == "assistant":
                ids = tokenizer.encode(message["content"])
                assert tokenizer.decode(ids) == message["content"]
    for text in texts:
        assert tokenizer.unk_token_id not in tokenizer.encode(text)


def test_filler_lengthens_passages() -> None:
    rng = random.Random(0)
    world = search.make_world(rng)
    rows = search.make_passages(rng, world, filler_words=500)
    lengths = sorted(len(row["contents"].split()) for row in rows)
    assert 400 < sum(lengths) / len(lengths) < 650
    assert lengths[-1] > 2000 > lengths[len(lengths) // 2]
    plain = search.make_passages(rng, world)
    assert max(len(row["contents"].split()) for row in plain) < 12


def test_rows_stay_within_the_limit_only_with_the_new_form(tmp_path: Path) -> None:
    shapes, limit = row_shapes.measure(tmp_path, filler_words=600, num_prompts=3)
    old, gen_only, merged = shapes
    assert limit == 4096 + 500
    assert gen_only.longest <= limit < old.longest
    assert merged.longest <= limit
    assert merged.num_rows < gen_only.num_rows <= old.num_rows
    assert merged.num_trained == gen_only.num_trained
    assert merged.num_tokens < gen_only.num_tokens < old.num_tokens
