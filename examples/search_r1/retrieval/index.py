"""Search indexes: BM25 by bm25s, or vectors by FAISS.

N passages, Q queries, D dimensions of a vector.
"""

from __future__ import annotations

import hashlib
import logging
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from examples.search_r1.retrieval.corpus import Corpus

log = logging.getLogger(__name__)

Hits = list[tuple[int, float]]  # passage number and score, best first

ENCODER_BATCH = 64
MAX_ENCODER_TOKENS = 256
DIGESTS = "SHA256SUMS"  # of the files in an index's folder
CORPUS = "corpus.xxh3"  # digest of the passages' file


class Index(Protocol):
    """Finds passages by a query; safe to call from several threads."""

    name: str

    def search(self, queries: Sequence[str], topk: int) -> list[Hits]:
        """Return for each query at most `topk` passages, best first; ties in corpus order."""


def best(scores: np.ndarray, topk: int) -> Hits:
    """Return the `topk` largest positive scores; ties in the order of their numbers.

    Args:
        scores: (N,) float.

    Example:
        >>> best(np.array([0.0, 2.0, 1.0, 2.0]), 2)
        [(1, 2.0), (3, 2.0)]
    """
    candidates = np.flatnonzero(scores > 0)
    if len(candidates) > topk:
        least = np.partition(scores[candidates], -topk)[-topk]
        candidates = candidates[scores[candidates] >= least]
    order = candidates[np.argsort(-scores[candidates], kind="stable")][:topk]
    return [(int(number), float(scores[number])) for number in order]


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Raise ValueError naming the saved index if it cannot be read."""
    try:
        yield
    except (AttributeError, EOFError, LookupError, OSError, RuntimeError, ValueError) as error:
        raise ValueError(
            f"index: {path} cannot be read, delete it to rebuild it: "
            f"{type(error).__name__}: {error}"
        ) from error


@contextmanager
def _new(path: Path) -> Iterator[Path]:
    """Yield where to write an index before it is renamed: in a new folder next to it."""
    # That folder is removed at the end, also after an error; a process that is killed leaves it.
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as folder:
        yield Path(folder) / path.name


def _check_corpus(saved: Path, digest: Path, num_passages: int, corpus: Corpus) -> None:
    """Raise ValueError if a saved index is of another corpus; one made elsewhere has no digest."""
    if num_passages != len(corpus):
        raise ValueError(
            f"index: {saved} is of {num_passages} passages, {corpus.path} has {len(corpus)}: "
            "delete it to rebuild it"
        )
    if digest.exists() and digest.read_text() != corpus.digest:
        raise ValueError(
            f"index: {saved} is of other passages than {corpus.path} has now: delete it to "
            "rebuild it"
        )


class Bm25Index:
    """BM25 (Robertson and Zaragoza 2009, Lucene's variant) over words, in memory.

    A passage without any word of the query is not returned.

    Args:
        folder: folder of the saved index; loaded if it exists, else written. None: not saved.

    Raises:
        ImportError: bm25s is not installed.
        ValueError: the saved index is of another corpus, damaged, or cannot be read; no passage has
            words.
    """

    name = "bm25"

    def __init__(self, corpus: Corpus, folder: Path | None = None) -> None:
        try:
            import bm25s
        except ImportError as error:
            raise ImportError("BM25 needs the package bm25s: pip install bm25s") from error
        self._tokenize = bm25s.tokenize
        if folder is not None and folder.exists():
            with _reading(folder):
                check_digests(folder / DIGESTS)
                self._bm25 = bm25s.BM25.load(str(folder), mmap=True, show_progress=False)
                indexed = int(self._bm25.scores["num_docs"])
            _check_corpus(folder, folder / CORPUS, indexed, corpus)
            return
        self._bm25 = bm25s.BM25(method="lucene")
        words = bm25s.tokenize(list(corpus.texts()), stopwords="en", show_progress=False)
        if not words.vocab:
            raise ValueError(f"index: {corpus.path} has no words except very frequent ones")
        self._bm25.index(words, show_progress=False)
        if folder is not None:
            with _new(folder) as new:
                self._bm25.save(str(new), show_progress=False)
                (new / CORPUS).write_text(corpus.digest)
                write_digests(new / DIGESTS, sorted(new.iterdir()))
                new.rename(folder)

    def search(self, queries: Sequence[str], topk: int) -> list[Hits]:
        return [self._search(query, topk) for query in queries]

    def _search(self, query: str, topk: int) -> Hits:
        (words,) = self._tokenize(
            [query], stopwords="en", return_ids=False, show_progress=False, allow_empty=False
        )
        # bm25s returns the empty word for a text without words.
        known = [word for word in words if word and word in self._bm25.vocab_dict]
        return best(self._bm25.get_scores(known), topk) if known else []


class TransformersEncoder:
    """A text encoder of the E5 family: mean of the last layer, normalised.

    Args:
        path: folder or hub name; its code is never run.
    """

    def __init__(self, path: str) -> None:
        from transformers import AutoModel, AutoTokenizer

        self._tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
        self._model = AutoModel.from_pretrained(path, trust_remote_code=False).eval()

    def encode(self, texts: Sequence[str], *, is_query: bool) -> np.ndarray:
        """Return the vectors of Q texts, of length 1: (Q, D) float32."""
        import torch

        prefix = "query: " if is_query else "passage: "  # as in the models' training
        batch = self._tokenizer(
            [prefix + text for text in texts],
            max_length=MAX_ENCODER_TOKENS,
            padding=True,
            truncation=True,
            return_tensors="pt",
        )
        mask = batch["attention_mask"][..., None]
        with torch.inference_mode():
            hidden = self._model(**batch).last_hidden_state.float() * mask
            mean = hidden.sum(dim=1) / mask.sum(dim=1).clamp(min=1)
            return torch.nn.functional.normalize(mean, dim=-1).numpy().astype(np.float32)


class FaissIndex:
    """Exact inner products of vectors, by FAISS.

    Args:
        file: file of the saved vectors (any FAISS index of the same passages); loaded if it exists,
            else written. None: not saved.

    Raises:
        ImportError: faiss is not installed.
    """

    name = "faiss"

    def __init__(
        self, corpus: Corpus, encoder: TransformersEncoder, file: Path | None = None
    ) -> None:
        try:
            import faiss
        except ImportError as error:
            raise ImportError(
                "the dense index needs the package faiss: pip install faiss-cpu, or "
                "choose --index bm25"
            ) from error
        self._encoder = encoder
        if file is not None and file.exists():
            with _reading(file):
                if _digests_of(file).exists():
                    check_digests(_digests_of(file))
                else:
                    log.warning(
                        "%s has no digest in %s: damage goes unnoticed", file, _digests_of(file)
                    )
                self._faiss: Any = faiss.read_index(str(file))
            width = encoder.encode(["width"], is_query=True).shape[1]
            if self._faiss.d != width:
                raise ValueError(
                    f"index: {file} has vectors of size {self._faiss.d}, the encoder's have "
                    f"{width}: delete the file to rebuild it"
                )
            _check_corpus(file, _corpus_of(file), self._faiss.ntotal, corpus)
            return
        texts = list(corpus.texts())
        parts = [
            encoder.encode(texts[i : i + ENCODER_BATCH], is_query=False)
            for i in range(0, len(texts), ENCODER_BATCH)
        ]
        self._faiss = faiss.IndexFlatIP(parts[0].shape[1])
        for part in parts:
            self._faiss.add(part)
        if file is not None:
            with _new(file) as new:
                faiss.write_index(self._faiss, str(new))
                write_digests(_digests_of(new), [new])
                _corpus_of(new).write_text(corpus.digest)
                _corpus_of(new).rename(_corpus_of(file))
                _digests_of(new).rename(_digests_of(file))  # first: no index of ours is without
                new.rename(file)

    def search(self, queries: Sequence[str], topk: int) -> list[Hits]:
        vectors = self._encoder.encode(queries, is_query=True)
        scores, numbers = self._faiss.search(vectors, min(topk, self._faiss.ntotal))
        return [
            sorted(
                ((int(n), float(s)) for n, s in zip(*row, strict=True) if n >= 0),
                key=lambda hit: (-hit[1], hit[0]),
            )
            for row in zip(numbers, scores, strict=True)
        ]


def _digests_of(file: Path) -> Path:
    return file.with_name(f"{file.name}.sha256")


def _corpus_of(file: Path) -> Path:
    return file.with_name(f"{file.name}.{CORPUS}")


# --- SHA-256 digests of saved files, in the format of `sha256sum`


def write_digests(listing: Path, files: Sequence[Path]) -> None:
    """Write the digests of files, which are in the same folder as the listing."""
    lines = [f"{_hash(file)}  {file.name}\n" for file in files]
    listing.write_text("".join(lines), encoding="utf-8")


def check_digests(listing: Path) -> None:
    """Raise ValueError for the first file whose content is not what was written.

    The files are read completely: about a second for each gigabyte and a half.
    """
    for line in listing.read_text(encoding="utf-8").splitlines():
        digest, _, name = line.partition("  ")
        if _hash(listing.parent / name) != digest:
            raise ValueError(f"{name}: its content is not what was written (digests differ)")


def _hash(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
