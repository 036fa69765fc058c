"""The quickstart's data: same seed, same files; the real environment agrees with every row."""

import random
import re
from pathlib import Path
from typing import Any

import pytest

skyrl_gym = pytest.importorskip("skyrl_gym")
pytest.importorskip("transformers")

from examples.quickstart import make_data  # noqa: E402
from examples.quickstart.warm_start import ENVIRONMENT_TEXTS  # noqa: E402
from examples.tiny_model import warm_start  # noqa: E402
from examples.tiny_model.jsonl import read_jsonl  # noqa: E402
from examples.tiny_model.model import make_model, make_tokenizer  # noqa: E402

NUM_TRAIN, NUM_EVAL, NUM_DEMONSTRATIONS = 40, 16, 300


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("quickstart")
    make_data.make_data(
        path, num_train=NUM_TRAIN, num_eval=NUM_EVAL, num_demonstrations=NUM_DEMONSTRATIONS
    )
    return path


@pytest.fixture(scope="module")
def rows(folder: Path) -> list[dict[str, Any]]:
    return [row for name in ("train", "eval") for row in read_jsonl(folder / f"{name}.jsonl")]


@pytest.fixture(scope="module")
def demonstrations(folder: Path) -> list[list[dict[str, str]]]:
    return read_jsonl(folder / "demonstrations.jsonl")


@pytest.fixture(scope="module")
def tokenizer(demonstrations: list[list[dict[str, str]]]) -> Any:
    texts = [m["content"] for chat in demonstrations for m in chat]
    return make_tokenizer([*texts, *ENVIRONMENT_TEXTS])


def make_env(folder: Path, row: dict[str, Any]) -> Any:
    config = {"db_path": str(folder / "databases")}
    from omegaconf import OmegaConf

    extras = {**row, "max_turns": make_data.MAX_TURNS}
    env = skyrl_gym.make(row["env_class"], env_config=OmegaConf.create(config), extras=extras)
    env.init(row["prompt"])
    return env


def parse_question(row: dict[str, Any]) -> make_data.Question:
    match = re.fullmatch(
        r"What is the (\w+) (\w+) of those with (\w+) (\w+) (\d+)\?", row["prompt"][-1]["content"]
    )
    assert match
    return make_data.Question(*match.groups()[:4], int(match.group(5)))


def run_agent(folder: Path, row: dict[str, Any], *, flip_comparison: bool = False) -> Any:
    """Run an agent that sees only the question and the tool's output; return reward and turns."""
    env = make_env(folder, row)
    question = parse_question(row)
    comparison = question.comparison
    if flip_comparison:
        comparison = next(word for word in make_data.COMPARISONS if word != comparison)
    for index in range(make_data.NUM_TABLES):
        text = f"<think> look </think> <sql> {make_data.look_sql(index)} </sql>"
        output = env.step(text)
        seen = output["observations"][0]["content"]
        name, columns = re.search(r"CREATE TABLE (\w+) \((.*)\)", seen).groups()
        if question.measure in re.findall(r"(\w+) INT", columns):
            break
    sql = make_data.solution_sql(question, name, comparison=comparison)
    output = env.step(f"<think> answer </think> <solution> {sql} </solution>")
    assert output["done"]
    return output["reward"], env.turns


def test_same_seed_same_files(folder: Path, tmp_path: Path) -> None:
    sizes = {"num_train": NUM_TRAIN, "num_eval": NUM_EVAL, "num_demonstrations": NUM_DEMONSTRATIONS}
    make_data.make_data(tmp_path / "same", **sizes)
    make_data.make_data(tmp_path / "other", seed=1, **sizes)
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        same = tmp_path / "same" / file.relative_to(folder)
        assert file.read_bytes() == same.read_bytes()
    for name in ("train.jsonl", "eval.jsonl", "demonstrations.jsonl"):
        assert (folder / name).read_bytes() != (tmp_path / "other" / name).read_bytes()


def test_sizes(rows: list[dict[str, Any]], demonstrations: list[Any]) -> None:
    assert len(rows) == NUM_TRAIN + NUM_EVAL
    assert len(demonstrations) == NUM_DEMONSTRATIONS


def test_eval_is_held_out(folder: Path, demonstrations: list[list[dict[str, str]]]) -> None:
    train, held_out = (read_jsonl(folder / f"{name}.jsonl") for name in ("train", "eval"))
    questions = [{row["prompt"][-1]["content"] for row in split} for split in (train, held_out)]
    demonstrated = {chat[1]["content"] for chat in demonstrations}
    assert len(questions[1]) == NUM_EVAL
    assert not questions[0] & questions[1]
    assert not demonstrated & questions[1]
    assert not {row["db_id"] for row in train} & {row["db_id"] for row in held_out}


def test_prompt_does_not_name_the_table(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        text = " ".join(message["content"] for message in row["prompt"])
        table = row["reward_spec"]["ground_truth"].split(" FROM ")[1].split()[0]
        assert table not in text


def test_perfect_agent_gets_one_everywhere(folder: Path, rows: list[dict[str, Any]]) -> None:
    results = [run_agent(folder, row) for row in rows]
    assert [reward for reward, _ in results] == [1.0] * len(rows)
    assert {turns for _, turns in results} == {2, 3}


def test_wrong_comparison_gets_zero_everywhere(folder: Path, rows: list[dict[str, Any]]) -> None:
    assert {run_agent(folder, row, flip_comparison=True)[0] for row in rows} == {0.0}


@pytest.mark.parametrize(
    ("answer", "reward"),
    [
        ("<think> known </think> <solution> {gold} </solution>", 1.0),
        ("<think> guess </think> <solution> SELECT 0 </solution>", 0.0),
        ("<think> guess </think> <solution> SELECT MAX ( x ) FROM nowhere </solution>", 0.0),
        ("<solution> {gold} </solution>", -1.0),
        ("<think> unclosed <solution> {gold} </solution>", -1.0),
    ],
)
def test_rewards_of_the_environment(
    folder: Path, rows: list[dict[str, Any]], answer: str, reward: float
) -> None:
    env = make_env(folder, rows[0])
    text = answer.format(gold=rows[0]["reward_spec"]["ground_truth"])
    assert env.step(text)["reward"] == reward


def test_rendered_observation_equals_that_of_the_environment(
    folder: Path, rows: list[dict[str, Any]], tokenizer: Any
) -> None:
    env = make_env(folder, rows[0])
    for index in range(make_data.NUM_TABLES):
        output = env.step(f"<think> look </think> <sql> {make_data.look_sql(index)} </sql>")
        seen = output["observations"][0]["content"]
        create_sql = re.search(r"CREATE TABLE .*\)", seen).group()
        turns_left = make_data.MAX_TURNS - index - 1
        rendered = make_data.render_observation(create_sql, turns_left)
        # pandas may change its padding; the tokens are what the model sees.
        assert rendered.split() == seen.split()
        assert tokenizer.encode(rendered) == tokenizer.encode(seen)
        assert tokenizer.unk_token_id not in tokenizer.encode(seen)


def test_careless_expert_succeeds_sometimes() -> None:
    # (1 - guess)(1 - stop_early / 2)(1 - under / 2)(1 - no_think) = 0.42; four standard errors of
    # 300 are 0.11.
    rng = random.Random(0)
    right = 0
    for _ in range(NUM_DEMONSTRATIONS):
        tables = make_data.make_tables(rng)
        question = make_data.make_question(rng, tables)
        last = make_data.demonstrate(rng, question, tables, make_data.Carelessness())[-1]
        right += last.startswith("<think>") and make_data.gold_sql(question, tables) in last
    assert 0.31 < right / NUM_DEMONSTRATIONS < 0.53


def test_perfect_expert_always_succeeds() -> None:
    rng = random.Random(0)
    for _ in range(50):
        tables = make_data.make_tables(rng)
        question = make_data.make_question(rng, tables)
        turns = make_data.demonstrate(rng, question, tables, make_data.PERFECT)
        assert make_data.gold_sql(question, tables) in turns[-1]
        assert len(turns) == make_data.find_table(question, tables) + 2


def test_tokenizer_keeps_every_turn(
    tokenizer: Any, rows: list[dict[str, Any]], demonstrations: list[list[dict[str, str]]]
) -> None:
    for chat in demonstrations:
        for message in chat:
            ids = tokenizer.encode(message["content"], add_special_tokens=False)
            assert tokenizer.unk_token_id not in ids
            if message["role"] == "assistant":
                assert tokenizer.decode(ids) == message["content"]
    for row in rows:
        gold = row["reward_spec"]["ground_truth"]
        assert tokenizer.decode(tokenizer.encode(gold)) == gold


def test_tags_are_single_tokens_kept_by_decoding(tokenizer: Any) -> None:
    tags = ["<think>", "</think>", "<sql>", "</sql>", "<solution>", "</solution>"]
    for tag in tags:
        assert len(tokenizer.encode(tag)) == 1
        assert tokenizer.decode(tokenizer.encode(tag), skip_special_tokens=True) == tag


def test_saved_folder_loads_with_the_auto_classes(tokenizer: Any, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    make_model(tokenizer).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    text = "<think> look at table 1 </think> <sql> SELECT sql FROM sqlite_master </sql>"
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert loaded.encode(text) == tokenizer.encode(text)
    assert loaded.decode(loaded.encode(text)) == text
    assert AutoModelForCausalLM.from_pretrained(tmp_path).config.vocab_size >= len(loaded)


def test_labels_cover_assistant_turns_only(tokenizer: Any) -> None:
    chat = [
        {"role": "user", "content": "What is the highest price of those with age over 30?"},
        {"role": "assistant", "content": "<think> look at table 1 </think>"},
    ]
    ((ids, labels),) = warm_start.encode_chats(tokenizer, [chat])
    assert tokenizer.decode([label for label in labels if label != warm_start.IGNORED]) == (
        "<think> look at table 1 </think> <|im_end|>"
    )
    assert ids == tokenizer.apply_chat_template(chat, tokenize=True, return_dict=False)


def test_few_steps_lower_the_loss(
    tokenizer: Any, demonstrations: list[list[dict[str, str]]]
) -> None:
    rows = warm_start.encode_chats(tokenizer, demonstrations)
    model = make_model(tokenizer, hidden_size=32, num_layers=1, num_heads=1)
    settings = {"batch_size": 16, "num_warmup_steps": 1, "learning_rate": 1e-2}
    first = warm_start.train(model, rows, num_steps=1, **settings)
    last = warm_start.train(model, rows, num_steps=10, **settings)
    assert last < 0.9 * first
