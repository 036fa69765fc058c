"""Errors about relative paths say where was looked."""

from pathlib import Path

import pytest

from skyrl_fast import cli
from skyrl_fast.system.location import described_path


@pytest.mark.spec("run.relative-paths")
@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("train none.yaml", "none.yaml"),
        ("train run.yaml data.train_data=[none.jsonl]", "none.jsonl"),
        ("train run.yaml trainer.policy.model.path=./none", "./none"),
        ("train run.yaml generator.chat_template=none.jinja", "none.jinja"),
    ],
)
def test_a_relative_path_is_named_with_the_place_that_it_means(
    words: str,
    named: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").touch()
    Path("model").mkdir()
    Path("model/config.json").write_text("{}")
    Path("run.yaml").write_text(
        "data: {train_data: [rows.jsonl]}\ntrainer: {policy: {model: {path: ./model}}}\n"
    )
    assert cli.main(words.split()) == 2
    wanted = f"{named} (that is {tmp_path / named}: relative paths are those of the current folder)"
    assert wanted in capsys.readouterr().err


def test_other_paths_are_named_as_given() -> None:
    assert described_path("/data/a.jsonl") == "/data/a.jsonl"
    assert described_path(Path("/data/a.jsonl")) == "/data/a.jsonl"
    assert described_path("~/a.jsonl") == "~/a.jsonl"
    assert described_path("~nosuchuser/a.jsonl") == "~nosuchuser/a.jsonl"
