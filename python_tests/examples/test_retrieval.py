"""The search server: results, responses, refusals, start and exit."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("bm25s")
pytest.importorskip("fastapi")
pytest.importorskip("httpx")

from fastapi.testclient import TestClient

from examples.search_r1.retrieval import index as index_module
from examples.search_r1.retrieval.__main__ import argument_parser, main
from examples.search_r1.retrieval.corpus import Corpus
from examples.search_r1.retrieval.index import Bm25Index, FaissIndex, best
from examples.search_r1.retrieval.launch import retrieval_server
from examples.search_r1.retrieval.server import Limits, make_app

ROOT = Path(__file__).parents[2]
PASSAGES = [
    '"Aachen"\nAachen is a city. Its mayor is Bruno.',
    '"Bruno"\nBruno was born in Genoa.',
    '"Genoa"\nGenoa lies at the sea.',
    '"Clara"\nClara works in Aachen.',
]
END_SECONDS = 20.0


@pytest.fixture(scope="module")
def corpus_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("corpus") / "corpus.jsonl"
    rows = [json.dumps({"id": f"d{i}", "contents": text}) for i, text in enumerate(PASSAGES)]
    path.write_text("\n".join(rows) + "\n\n")
    return path


@pytest.fixture(scope="module")
def corpus(corpus_file: Path) -> Corpus:
    return Corpus(corpus_file)


@pytest.fixture(scope="module")
def client(corpus: Corpus) -> TestClient:
    limits = Limits(body_bytes=2000, queries=3, query_characters=100, topk=4)
    return TestClient(make_app(corpus, Bm25Index(corpus), topk=2, limits=limits))


def found(answer: Any) -> list[list[str]]:
    assert answer.status_code == 200, answer.text
    return [[hit.get("document", hit)["id"] for hit in hits] for hits in answer.json()["result"]]


# --- corpus and index --------------------------------------------------------------------------


def test_corpus_reads_passages_from_the_file(corpus: Corpus) -> None:
    assert len(corpus) == 4
    assert corpus[1] == {"id": "d1", "contents": PASSAGES[1]}
    assert list(corpus.texts()) == PASSAGES


def test_corpus_numbers_passages_without_id_and_accepts_a_missing_last_newline(
    tmp_path: Path,
) -> None:
    path = tmp_path / "c.jsonl"
    path.write_text('{"contents": "a"}\n\n{"contents": "b"}')
    corpus = Corpus(path)
    assert [corpus[0], corpus[1]] == [{"id": "0", "contents": "a"}, {"id": "1", "contents": "b"}]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "no such file"),
        ("", "is empty"),
        ("\n \n", "has no passages"),
        ('{"contents": "a"}\n\n[1]\n', "line 3: expected an object"),
        ('{"contents": "a"}\n{"contents":\n', "line 2: invalid JSON"),
        ('{"contents": 7}\n', "line 1: expected an object with the text 'contents'"),
        ('{"contents": "a"}\n' + "[" * 100_000, "line 2: invalid JSON: maximum recursion depth"),
        ('{"contents": "a", "id": ' + "9" * 5000 + "}", "line 1: invalid JSON: Exceeds the limit"),
        ('{"contents": "a", "id": [[1]]}', "line 1: id: expected text or a number, got list"),
    ],
)
def test_invalid_corpus_error_names_the_place(tmp_path: Path, text: str | None, said: str) -> None:
    path = tmp_path / "c.jsonl"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ValueError, match=said):
        list(Corpus(path).texts())


@given(st.lists(st.sampled_from([0.0, 0.5, 1.0, 2.0]), max_size=40), st.integers(1, 50))
def test_best_is_a_stable_sort_of_positive_scores(scores: list[float], topk: int) -> None:
    wanted = sorted(
        ((i, s) for i, s in enumerate(scores) if s > 0), key=lambda hit: (-hit[1], hit[0])
    )
    assert best(np.array(scores), topk) == wanted[:topk]


def test_bm25_prefers_rare_words_and_finds_nothing_for_unknown_ones(corpus: Corpus) -> None:
    index = Bm25Index(corpus)
    by_name, by_work, unknown, empty, signs = index.search(
        ["born Bruno", "Who works in Aachen?", "zebra", "", "?!"], 3
    )
    assert [number for number, _ in by_name] == [1, 0]
    assert [number for number, _ in by_work] == [3, 0]
    assert unknown == empty == signs == []
    assert by_name[0][1] > by_name[1][1] > 0


def test_bm25_index_is_cached_and_validated(corpus: Corpus, tmp_path: Path) -> None:
    made = Bm25Index(corpus, tmp_path / "index")
    kept = Bm25Index(corpus, tmp_path / "index")
    queries = ["mayor of Aachen", "sea"]
    assert kept.search(queries, 4) == made.search(queries, 4)
    smaller = tmp_path / "smaller.jsonl"
    smaller.write_text('{"contents": "a passage"}\n')
    with pytest.raises(ValueError, match="is of 4 passages"):
        Bm25Index(Corpus(smaller), tmp_path / "index")
    lines = corpus.path.read_text().splitlines(keepends=True)
    changed = tmp_path / "changed.jsonl"
    changed.write_text("".join([*lines[1:], lines[0]]))
    with pytest.raises(ValueError, match=r"is of other passages than \S+ has now"):
        Bm25Index(Corpus(changed), tmp_path / "index")


class LetterCounts:
    """Encodes a text as its letter counts."""

    def encode(self, texts: Sequence[str], *, is_query: bool) -> np.ndarray:
        counts = [[text.lower().count(chr(97 + i)) for i in range(26)] for text in texts]
        vectors = np.array(counts, dtype=np.float32) + 1e-3
        return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def test_faiss_finds_the_nearest_vector(corpus: Corpus, tmp_path: Path) -> None:
    pytest.importorskip("faiss")
    made = FaissIndex(corpus, LetterCounts(), tmp_path / "vectors")
    for number, text in enumerate(PASSAGES):
        (hits,) = made.search([text], 10)
        assert hits[0][0] == number
        assert hits[0][1] == pytest.approx(1, abs=1e-5)
        assert len(hits) == 4
    kept = FaissIndex(corpus, LetterCounts(), tmp_path / "vectors")
    assert kept.search(["sea", "mayor"], 2) == made.search(["sea", "mayor"], 2)
    smaller = tmp_path / "smaller.jsonl"
    smaller.write_text('{"contents": "a passage"}\n')
    with pytest.raises(ValueError, match="is of 4 passages"):
        FaissIndex(Corpus(smaller), LetterCounts(), tmp_path / "vectors")


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_index_left_by_a_kill_is_reported(share: float, corpus: Corpus, tmp_path: Path) -> None:
    def cut(file: Path) -> None:
        content = file.read_bytes()
        file.write_bytes(content[: int(len(content) * share)])

    Bm25Index(corpus, tmp_path / "words")
    for file in (tmp_path / "words").iterdir():
        cut(file)
    with pytest.raises(ValueError, match="words cannot be read, delete it to rebuild it"):
        Bm25Index(corpus, tmp_path / "words")
    pytest.importorskip("faiss")
    FaissIndex(corpus, LetterCounts(), tmp_path / "vectors")
    cut(tmp_path / "vectors")
    with pytest.raises(ValueError, match="vectors cannot be read, delete it to rebuild it"):
        FaissIndex(corpus, LetterCounts(), tmp_path / "vectors")


def flip_a_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def test_flipped_bit_in_any_file_of_an_index_is_noticed(corpus: Corpus, tmp_path: Path) -> None:
    Bm25Index(corpus, tmp_path / "words")
    names = sorted(path.name for path in (tmp_path / "words").iterdir())
    assert len(names) > 3
    for name in names:
        folder = tmp_path / f"damaged {name}"
        shutil.copytree(tmp_path / "words", folder)
        flip_a_bit(folder / name)
        with pytest.raises(ValueError, match=r"cannot be read, delete it to rebuild it: "):
            Bm25Index(corpus, folder)
    (tmp_path / "words/SHA256SUMS").unlink()
    with pytest.raises(ValueError, match="FileNotFoundError"):
        Bm25Index(corpus, tmp_path / "words")


def test_flipped_bit_in_vectors_is_noticed(
    corpus: Corpus, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("faiss")
    made = FaissIndex(corpus, LetterCounts(), tmp_path / "vectors")
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "vectors",
        "vectors.corpus.xxh3",
        "vectors.sha256",
    ]
    (tmp_path / "vectors.sha256").rename(tmp_path / "elsewhere")  # an index from elsewhere has none
    kept = FaissIndex(corpus, LetterCounts(), tmp_path / "vectors")
    assert kept.search(["sea"], 2) == made.search(["sea"], 2)
    assert "vectors has no digest" in caplog.text
    (tmp_path / "elsewhere").rename(tmp_path / "vectors.sha256")
    flip_a_bit(tmp_path / "vectors")
    with pytest.raises(ValueError, match=r"rebuild it: ValueError: vectors: .*digests differ"):
        FaissIndex(corpus, LetterCounts(), tmp_path / "vectors")


def test_other_files_next_to_an_index_stay(corpus: Corpus, tmp_path: Path) -> None:
    pytest.importorskip("faiss")
    for name in (".words.partial", ".vectors.partial"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "note").write_text("mine")
    Bm25Index(corpus, tmp_path / "words")
    FaissIndex(corpus, LetterCounts(), tmp_path / "vectors")
    for name in (".words.partial", ".vectors.partial"):
        assert (tmp_path / name / "note").read_text() == "mine"


def test_an_index_is_renamed_when_it_is_complete(
    corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import bm25s

    def killed(self: Any, folder: str, **options: Any) -> None:
        Path(folder).mkdir()
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(bm25s.BM25, "save", killed)
        with pytest.raises(KeyboardInterrupt):
            Bm25Index(corpus, tmp_path / "words")
    Bm25Index(corpus, tmp_path / "words")
    assert [path.name for path in tmp_path.iterdir()] == ["words"]


def test_index_of_another_encoder_is_refused(corpus: Corpus, tmp_path: Path) -> None:
    pytest.importorskip("faiss")
    FaissIndex(corpus, LetterCounts(), tmp_path / "vectors")

    class Other(LetterCounts):
        def encode(self, texts: Sequence[str], *, is_query: bool) -> np.ndarray:
            return super().encode(texts, is_query=is_query)[:, :8]

    with pytest.raises(ValueError, match="has vectors of size 26, the encoder's have 8"):
        FaissIndex(corpus, Other(), tmp_path / "vectors")


def test_corpus_without_words_is_named(tmp_path: Path) -> None:
    path = tmp_path / "corpus.jsonl"
    path.write_text('{"contents": "the of a"}')
    with pytest.raises(ValueError, match=r"corpus\.jsonl has no words"):
        Bm25Index(Corpus(path))


def test_encoder_vectors_are_normalized_and_independent_of_padding(tiny_model_folder: Path) -> None:
    encoder = index_module.TransformersEncoder(str(tiny_model_folder))
    alone = encoder.encode(["sea"], is_query=True)
    padded = encoder.encode(["sea", "a much longer text"], is_query=True)
    assert np.linalg.norm(padded, axis=1) == pytest.approx([1, 1], abs=1e-5)
    assert np.abs(alone[0] - padded[0]).max() < 1e-5
    assert np.abs(encoder.encode(["sea"], is_query=False) - alone).max() > 1e-4


@pytest.mark.parametrize(("package", "wanted"), [("bm25s", "bm25s"), ("faiss", "faiss-cpu")])
def test_missing_package_is_named(
    corpus: Corpus, monkeypatch: pytest.MonkeyPatch, package: str, wanted: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=f"pip install {wanted}"):
        Bm25Index(corpus) if package == "bm25s" else FaissIndex(corpus, LetterCounts())


# --- responses -----------------------------------------------------------------------------------


def test_one_query_with_scores(client: TestClient) -> None:
    answer = client.post(
        "/retrieve", json={"query": "born Bruno", "topk": 1, "return_scores": True}
    )
    ((hit,),) = answer.json()["result"]
    assert hit["document"] == {"id": "d1", "contents": PASSAGES[1]}
    assert hit["score"] > 0


def test_several_queries_without_scores(client: TestClient) -> None:
    answer = client.post("/retrieve", json={"queries": ["born Bruno", "zebra", "sea"]})
    assert found(answer) == [["d1", "d0"], [], ["d2"]]
    assert answer.json()["result"][2] == [{"id": "d2", "contents": PASSAGES[2]}]


def test_lone_surrogate_in_a_passage_does_not_fail_queries(tmp_path: Path) -> None:
    path = tmp_path / "corpus.jsonl"
    path.write_text('{"id": "\\ud800", "contents": "cat \\ud800 \\ud83d\\ude00"}\n')
    corpus = Corpus(path)
    answer = TestClient(make_app(corpus, Bm25Index(corpus))).post(
        "/retrieve", json={"query": "cat"}
    )
    assert answer.json()["result"] == [[{"id": "?", "contents": "cat ? \U0001f600"}]]


def test_unknown_key_is_not_echoed(client: TestClient) -> None:
    answer = client.post("/retrieve", json={"query": "a", "secret" * 100: 1})
    assert answer.status_code == 422
    assert answer.json()["detail"][0]["where"] == ["body", "an unknown key"]


def test_health(client: TestClient) -> None:
    assert client.get("/health").json() == {"status": "ok", "index": "bm25", "documents": 4}


# --- refusals ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"query": "a", "queries": ["b"]},
        {"query": None},
        {"query": 7},
        {"query": ["a"]},
        {"queries": "a"},
        {"queries": []},
        {"queries": ["a"] * 4},
        {"queries": ["a", None]},
        {"query": "a" * 101},
        {"query": "a", "topk": 0},
        {"query": "a", "topk": -1},
        {"query": "a", "topk": 5},
        {"query": "a", "topk": 10**30},
        {"query": "a", "topk": "2"},
        {"query": "a", "topk": True},
        {"query": "a", "topk": 1.5},
        {"query": "a", "return_scores": "yes"},
        {"query": "a", "unknown": 1},
        [],
        "a",
        None,
    ],
    ids=str,
)
def test_malformed_requests_are_refused(client: TestClient, body: Any) -> None:
    answer = client.post("/retrieve", json=body)
    assert answer.status_code == 422
    assert len(answer.text) < 1000


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"\xff\xfe", b'{"query": "\\ud800"}', b"[" * 1900, b'{"query": NaN}', b"\x00"],
    ids=["empty", "cut", "no text", "half a character", "deep", "nan", "nul"],
)
def test_invalid_request_bodies_are_refused(client: TestClient, body: bytes) -> None:
    answer = client.post("/retrieve", content=body, headers={"content-type": "application/json"})
    assert 400 <= answer.status_code < 500


@given(st.binary(max_size=300))
def test_server_survives_arbitrary_bytes(client: TestClient, body: bytes) -> None:
    answer = client.post("/retrieve", content=body, headers={"content-type": "application/json"})
    assert answer.status_code < 500


JSON = {"content-type": "application/json"}


def test_oversized_bodies_are_refused_with_or_without_content_length(client: TestClient) -> None:
    assert client.post("/retrieve", content=b" " * 2001, headers=JSON).status_code == 413
    parts = iter([b" " * 1500, b" " * 1500])
    assert client.post("/retrieve", content=parts, headers=JSON).status_code == 413


def test_web_pages_are_refused(client: TestClient) -> None:
    body = b'{"query": "Bruno"}'
    page = {"origin": "http://evil.example"}
    assert client.post("/retrieve", content=body, headers={**JSON, **page}).status_code == 403
    text = {"content-type": "text/plain"}
    assert client.post("/retrieve", content=body, headers=text).status_code == 415
    assert client.post("/retrieve", content=body).status_code == 415
    assert client.get("/health", headers=page).status_code == 403
    assert client.post("/retrieve", content=body, headers=JSON).status_code == 200


def test_other_paths_and_methods(client: TestClient) -> None:
    assert client.get("/retrieve").status_code == 405
    for path in ("/docs", "/openapi.json", "/", "/../etc/passwd"):
        assert client.get(path).status_code == 404


# --- the environment's client ------------------------------------------------------------------


def test_skyrl_gym_search_tool_parses_the_responses(corpus_file: Path, tmp_path: Path) -> None:
    skyrl_gym = pytest.importorskip("skyrl_gym")
    from omegaconf import OmegaConf

    with retrieval_server(corpus_file, log_file=tmp_path / "server.log") as url:
        assert url.startswith("http://127.0.0.1:")
        env = skyrl_gym.make(
            "search",
            env_config=OmegaConf.create(
                {"search_url": url, "topk": 1, "timeout": 5, "log_requests": False}
            ),
            extras={"reward_spec": {"ground_truth": {"target": ["Genoa"]}}, "max_turns": 3},
        )
        env.init([{"role": "user", "content": "Where was Bruno born?"}])
        seen = env.step("<search> Bruno born </search>")["observations"][0]["content"]
        expected = json.dumps({"result": f"Doc 1: {PASSAGES[1]}\n"})
        assert seen == f"\n<information>{expected}</information>\n"
        assert env.step("<answer> Genoa </answer>")["reward"] == 1
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(url, timeout=2)


@pytest.mark.spec("engine.key")
def test_server_does_not_inherit_the_key(
    corpus_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SKYRL_FAST_ENGINE_KEY", "k" * 32)
    given: dict[str, str] = {}

    def start(command: list[str], *, env: dict[str, str], **options: object) -> None:
        given.update(env)
        raise OSError("not started")

    monkeypatch.setattr("subprocess.Popen", start)
    with (
        pytest.raises(OSError, match="not started"),
        retrieval_server(corpus_file, log_file=tmp_path / "server.log"),
    ):
        pass
    assert "PATH" in given
    assert "SKYRL_FAST_ENGINE_KEY" not in given


# --- start and exit ------------------------------------------------------------------------------


def test_exception_in_the_with_block_stops_the_server(corpus_file: Path, tmp_path: Path) -> None:
    with (
        pytest.raises(KeyboardInterrupt),
        retrieval_server(corpus_file, log_file=tmp_path / "server.log") as url,
    ):
        raise KeyboardInterrupt
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(url, timeout=2)


def test_error_of_a_server_that_cannot_start(tmp_path: Path) -> None:
    with (
        pytest.raises(RuntimeError, match="no such file"),
        retrieval_server(tmp_path / "missing.jsonl", log_file=tmp_path / "server.log"),
    ):
        pass


STARTER = """
import signal, sys, time
from pathlib import Path
from examples.search_r1.retrieval.launch import retrieval_server
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
with retrieval_server(Path(sys.argv[1]), log_file=Path(sys.argv[2])) as url:
    print(url, flush=True)
    time.sleep(100)
"""


@pytest.mark.parametrize(
    "how", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGKILL]
)
def test_server_exits_with_its_parent(
    corpus_file: Path, tmp_path: Path, how: signal.Signals
) -> None:
    command = [sys.executable, "-c", STARTER, str(corpus_file), str(tmp_path / "log")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as starter:
        assert starter.stdout is not None
        port = int(starter.stdout.readline().rpartition(":")[2].partition("/")[0])
        starter.send_signal(how)
    deadline = time.monotonic() + END_SECONDS
    while time.monotonic() < deadline:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError:
            return
        time.sleep(0.05)
    pytest.fail("the server outlives its starter")


def test_loopback_is_the_default(corpus_file: Path) -> None:
    options = argument_parser().parse_args(["--corpus", str(corpus_file)])
    assert options.host == "127.0.0.1"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--corpus", "missing.jsonl"], "no such file"),
        (["--corpus", "CORPUS", "--port", "70000"], "cannot listen on 127.0.0.1:70000"),
    ],
)
def test_command_line_errors(
    corpus_file: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    given = [str(corpus_file) if text == "CORPUS" else text for text in arguments]
    assert main(given) == 2
    assert said in capsys.readouterr().err
