"""Prompts from rows in SkyRL's format, and the order of the prompts in training.

A row is a mapping with `prompt` (a list of chat messages), optionally `env_class`, `data_source`,
`tools` and `chat_template_kwargs` (for the chat template) and further keys; the environment gets
them as `env_extras`.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from os.path import expanduser
from pathlib import Path
from typing import Any

import torch

from skyrl_fast.config.files import DATA_SUFFIXES
from skyrl_fast.rollout.chat_messages import (
    normalize_messages,
    parse_json,
    plain_value,
    template_kwargs_of,
    without_nulls,
)
from skyrl_fast.system.location import described_path

PromptSource = str | os.PathLike[str] | Iterable[Any]
CHATS = ("prompt", "messages", "completion")  # columns of messages
TEMPLATE_KWARGS = ("tools", "chat_template_kwargs")  # columns


@dataclass(frozen=True, slots=True)
class Prompt:
    """One task for the agent; its group of trajectories carries the uid.

    Args:
        uid: name of its group.
        messages: the first prompt, as chat messages.
        env_class: name of its environment.
        env_extras: the row's other columns, which the environment gets.
        data_source: name of the data set, for metrics.
        is_text: whether the row's prompt is a string, which became a user message.
    """

    uid: str
    messages: list[dict[str, Any]]
    env_class: str
    env_extras: dict[str, Any]
    data_source: str | None = None
    is_text: bool = False


def load_prompts(
    paths: Sequence[str],
    *,
    default_env_class: str,
    prefix: str = "",
    split: str = "train",
    names_sources: bool = False,
) -> list[Prompt]:
    """Return all rows of the files, in order; uids are `prefix` plus the running number.

    Args:
        paths: .jsonl, .json (a list) or .parquet (needs pyarrow); or names of datasets on the
            Hugging Face hub (needs datasets).
        split: of a dataset on the hub.
        default_env_class: for rows without `env_class`.
        prefix: another one in training than in evaluation, so that these never share a uid.
        names_sources: give rows without a `data_source` the name of their file, without its folder
            and suffix.

    Raises:
        ValueError: a file is missing or of another type, or a row has no prompt; the message names
            file and row.
    """
    prompts: list[Prompt] = []
    for path in paths:
        start = len(prompts)
        found = _prompts(read_rows(path, split), default_env_class, prefix, start)
        if names_sources:
            name = Path(path).stem
            found = [replace(one, data_source=one.data_source or name) for one in found]
        prompts += found
    return prompts


def prompts_from(
    source: PromptSource, *, default_env_class: str, prefix: str = "", split: str = "train"
) -> list[Prompt]:
    """Return prompts from rows in memory, from files, or from a dataset on the hub.

    Arguments and errors are those of `rows_from` and `load_prompts`; a row may also be a string or
    a list of chat messages.
    """
    return _prompts(rows_from(source, split, "prompts"), default_env_class, prefix)


def _prompts(
    rows: Iterable[tuple[str, Any]], default_env_class: str, prefix: str, start: int = 0
) -> list[Prompt]:
    result: list[Prompt] = []
    for number, (where, row) in enumerate(rows, start):
        result.append(_prompt(row, f"{prefix}{number}", default_env_class, where))
    return result


def rows_from(source: PromptSource, split: str, name: str) -> Iterator[tuple[str, Any]]:
    """Yield each row with its location for error messages.

    Args:
        source: rows, in a list, a `datasets.Dataset` or a table of pandas, polars or pyarrow; or
            the name of a file or of a dataset on the hub. In a list, a `Path`, or a string that
            ends in .jsonl, .json or .parquet, is a file.

    Raises:
        ValueError: a file as for `load_prompts`; or the source is a mapping, e.g. of several
            splits, or a table of another kind.
    """
    if isinstance(source, str | os.PathLike):
        yield from read_rows(os.fspath(source), split)
        return
    for number, item in enumerate(_rows_of(source, name)):
        # A prompt that ends in .json is unlikely, and one with a space is none.
        if isinstance(item, os.PathLike) or _is_file_name(item):
            yield from read_rows(os.fspath(item), split)
        else:
            yield f"{name}, row {number}", item


def _rows_of(source: Iterable[Any], name: str) -> Iterable[Any]:
    """Return the rows of a source, which may iterate over the names of its columns."""
    if isinstance(source, Mapping):
        names = ", ".join(map(str, source))
        raise ValueError(f"{name}: expected rows, got a mapping with {names}: choose one")
    kind = type(source)
    table: Any = source
    if callable(getattr(kind, "to_pylist", None)):  # tables of pyarrow
        return map(_without_fill, table.to_pylist())
    if callable(getattr(kind, "to_dicts", None)):  # tables of polars
        return map(_without_fill, table.to_dicts())
    if callable(getattr(kind, "notna", None)):  # tables of pandas, whose missing values may be NaN
        values = table.astype(object).where(table.notna(), None)
        return map(_without_fill, values.to_dict("records") if values.ndim > 1 else values)
    if any(base.__module__.partition(".")[0] == "datasets" for base in kind.__mro__):
        return map(_without_fill, source)
    if hasattr(source, "columns") or hasattr(source, "column_names"):
        raise ValueError(f"{name}: expected rows, got a {kind.__name__}: pass a list of its rows")
    return source


def _without_fill(row: Any) -> Any:
    """Return an Arrow row without the nulls that stand for keys that only other rows have."""
    # All rows of a column have the same keys there. In columns that no chat template reads, a null
    # may as well be a value.
    if not isinstance(row, Mapping):
        return _chat_without_fill(row)
    plain = dict(row)
    plain |= {name: _chat_without_fill(row[name]) for name in CHATS if name in row}
    plain |= {n: without_nulls(plain_value(row[n])) for n in TEMPLATE_KWARGS if n in row}
    return plain


def _chat_without_fill(chat: Any) -> Any:
    chat = plain_value(chat)
    if not isinstance(chat, list):
        return chat
    return [without_nulls(message, keep=("content",)) for message in chat]


def _is_file_name(item: Any) -> bool:
    return isinstance(item, str) and item.endswith(DATA_SUFFIXES) and not set(item) & set(" \n")


def read_rows(path: str, split: str) -> Iterator[tuple[str, Any]]:
    """Yield each row of a file, or of a dataset on the hub, as `rows_from` does."""
    file = Path(expanduser(path))  # unlike Path's, no error for an unknown user
    rows = _rows(file) if file.suffix in DATA_SUFFIXES or file.exists() else _hub_rows(path, split)
    for number, row in enumerate(rows):
        yield f"{path}, row {number}", row


def _hub_rows(name: str, split: str) -> Iterable[Any]:
    try:
        import datasets
    except ImportError:
        raise ValueError(
            f"data file not found: {name}; a dataset on the hub needs datasets: "
            "pip install datasets"
        ) from None
    try:
        rows: Iterable[Any] = datasets.load_dataset(name, split=split)
    except Exception as error:
        raise ValueError(
            f"{name}: no such file, and no dataset on the hub with the split {split!r}: "
            f"{type(error).__name__}: {error}"
        ) from error
    return _rows_of(rows, name)


def _rows(path: Path) -> Iterator[Any]:
    if not path.is_file():
        raise ValueError(f"data file not found: {described_path(path)}")
    if path.suffix == ".jsonl":
        with path.open("rb") as lines:
            for number, line in enumerate(lines):
                if line.strip():
                    try:
                        yield json.loads(line)
                    except (ValueError, RecursionError) as error:  # also for invalid UTF-8
                        raise ValueError(
                            f"{path}, line {number + 1}: invalid JSON: {error}"
                        ) from error
    elif path.suffix == ".json":
        try:
            rows = json.loads(path.read_bytes())
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path}: invalid JSON: {error}") from error
        if not isinstance(rows, list):
            raise ValueError(f"{path}: expected a list of rows, got {type(rows).__name__}")
        yield from rows
    elif path.suffix == ".parquet":
        try:
            import pyarrow.parquet
        except ImportError as error:
            raise ValueError(
                f"{path}: reading parquet needs pyarrow (pip install pyarrow)"
            ) from error
        yield from _rows_of(pyarrow.parquet.read_table(path), str(path))
    else:
        raise ValueError(
            f"{path}: expected .jsonl, .json or .parquet, got {path.suffix or 'no suffix'!r}"
        )


def _prompt(row: Any, uid: str, default_env_class: str, where: str) -> Prompt:
    if not isinstance(row, Mapping):
        chat = plain_value(row)
        is_chat = isinstance(chat, list) and all(isinstance(m, Mapping) for m in chat)
        if not (is_chat or isinstance(chat, str)):
            raise ValueError(f"{where}: expected a mapping, got {type(row).__name__}")
        row = {"prompt": chat}
    extras = dict(row)
    messages = plain_value(extras.pop("prompt", None))
    is_text = isinstance(messages, str)
    if is_text:
        messages = [{"role": "user", "content": messages}]
    if not isinstance(messages, list) or not all(isinstance(m, Mapping) for m in messages):
        raise ValueError(
            f"{where}: prompt: expected a list of messages with role and content, got {messages!r}"
        )
    # Refused here, not in each episode; environments and agents get the messages of the row.
    try:
        normalize_messages(messages)
    except ValueError as error:
        raise ValueError(f"{where}: prompt: {error}") from None
    try:
        # Tables often store them as JSON text.
        extras |= {n: plain_value(parse_json(extras[n])) for n in TEMPLATE_KWARGS if n in extras}
        template_kwargs_of(extras)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    env_class = extras.pop("env_class", None) or default_env_class
    source = extras.get("data_source")
    if source is not None:
        source = str(source)
    return Prompt(uid, messages, str(env_class), extras, source, is_text)


def digest_of(prompts: Iterable[Prompt]) -> str:
    """Return a short digest of the rows: messages and other columns, in order."""
    # Of values that JSON cannot represent, such as objects of a script, only the type counts.
    digest = hashlib.sha256()
    for prompt in prompts:
        try:
            row = json.dumps([prompt.messages, prompt.env_extras], default=_plain, skipkeys=True)
        except (ValueError, RecursionError):  # contains itself, or is nested too deeply
            row = json.dumps(prompt.uid)
        digest.update(row.encode() + b"\n")
    return digest.hexdigest()[:16]


def _plain(value: Any) -> Any:
    """Return an array as a list; otherwise the name of the type."""
    if hasattr(value, "tolist"):
        return value.tolist()
    return type(value).__name__


class PromptSampler:
    """Order of the prompts, a function of (seed, epoch) alone; the full state is (epoch, position).

    Every epoch is a new permutation; a remainder smaller than a batch is dropped, as in SkyRL.

    Example:
        >>> sampler = PromptSampler(4, batch_size=2, seed=0)
        >>> sorted(sampler.next_batch() + sampler.next_batch())
        [0, 1, 2, 3]
        >>> sampler.epoch
        1
    """

    def __init__(
        self, num_prompts: int, *, batch_size: int, seed: int, digest: str | None = None
    ) -> None:
        if num_prompts < batch_size:
            raise ValueError(
                f"data.train_data: expected at least trainer.train_batch_size={batch_size} "
                f"prompts, got {num_prompts}"
            )
        self.epoch = 0
        self.position = 0
        self._num_prompts = num_prompts
        self._batch_size = batch_size
        self._seed = seed
        self._digest = digest  # recognises the prompts on resume
        self._order: tuple[int, list[int]] = (-1, [])  # number and order of an epoch

    @property
    def batches_per_epoch(self) -> int:
        return self._num_prompts // self._batch_size

    @property
    def prompts_per_epoch(self) -> int:
        return self.batches_per_epoch * self._batch_size

    def next_prompt(self) -> int:
        """Advance by one prompt; return its index."""
        prompt = self._prompt_at(self.epoch, self.position)
        self.position += 1
        if self.position >= self.prompts_per_epoch:
            self.epoch += 1
            self.position = 0
        return prompt

    def next_batch(self) -> list[int]:
        return [self.next_prompt() for _ in range(self._batch_size)]

    def move_to(self, epoch: int, position: int) -> None:
        self.epoch = epoch
        self.position = position

    def state(self) -> dict[str, Any]:
        """Return the state for `restore`, and the values that it checks; plain values."""
        return {
            "epoch": self.epoch,
            "position": self.position,
            "num_prompts": self._num_prompts,
            "batch_size": self._batch_size,
            "seed": self._seed,
            "digest": self._digest,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a saved `state`; ValueError if prompts, batch size or seed differ."""
        for name in ("num_prompts", "batch_size", "seed"):
            if state[name] != self.state()[name]:
                raise ValueError(
                    f"resume: the checkpoint was made with {name}={state[name]}, "
                    f"this run has {self.state()[name]}: the data order would differ"
                )
        if self._digest is not None and state.get("digest") not in (None, self._digest):
            raise ValueError(
                f"resume: the checkpoint was made with {self._num_prompts} other prompts: their "
                "messages, other columns or order differ (digest "
                f"{state['digest']}, now {self._digest}); restore them, or choose another "
                "trainer.run_path"
            )
        self.move_to(state["epoch"], state["position"])

    def _prompt_at(self, epoch: int, position: int) -> int:
        # A function of seed and epoch: a resumed run needs no state of a generator. The factor
        # keeps the epochs of neighbouring seeds apart.
        if self._order[0] != epoch:
            generator = torch.Generator().manual_seed(self._seed * 1_000_003 + epoch)
            order = torch.randperm(self._num_prompts, generator=generator).tolist()
            self._order = (epoch, order)
        return self._order[1][position]
