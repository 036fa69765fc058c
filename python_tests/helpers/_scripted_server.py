"""A process that answers as `vllm serve`: `python _scripted_server.py HOST PORT MODEL`.

It computes each request alone, with the model's weights in float32: tokens depend on weights,
prompt and seed to the bit, whichever engine answers and whatever it answers meanwhile. It takes
weights from a file and by broadcast, and exits with its parent.
"""

import json
import os
import sys
import threading
from collections.abc import Iterator
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from _phases import pause
from _small_server import KEY, JsonHandler

from skyrl_fast.rollout.engine.weights.group import WeightsGroup, store_at
from skyrl_fast.rollout.engine.weights.receipt import Receipt, record_digests
from skyrl_fast.rollout.engine.weights.transports.broadcast import receive_by_broadcast
from skyrl_fast.rollout.engine.weights.transports.file import receive_by_file
from skyrl_fast.system.parent_watch import exit_with_parent

LONGEST = 1024


class Engine:
    """A model that samples one request at a time."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.end = json.loads((folder / "config.json").read_text())["eos_token_id"]
        self.lock = threading.Lock()
        self.group: WeightsGroup | None = None

    def apply_patches(self) -> dict[str, bool]:
        return {}

    def weights_dtype(self) -> str:
        return "float32"

    def join_weights_group(self, backend: str, address: str, port: int, size: int) -> None:
        device = torch.device("cpu")
        group = WeightsGroup(backend, rank=1, size=size, device=device, trainer=address)
        group.connect(store_at(address, port))
        self.group = group

    def load_weights_broadcast(self) -> dict[str, Any]:
        assert self.group is not None
        return self._load(receive_by_broadcast(self.group))

    def load_weights_file(self, path: str) -> dict[str, Any]:
        return self._load(receive_by_file(path))

    def _load(self, weights: Iterator[tuple[str, torch.Tensor]]) -> dict[str, Any]:
        pause("hand-over")
        digests: dict[str, str] = {}
        with self.lock:
            self.model.load_state_dict(dict(record_digests(weights, digests)), strict=False)
        return asdict(Receipt(digests, [], "float32"))

    @torch.no_grad()
    def complete(self, request: dict[str, Any]) -> dict[str, Any]:
        with self.lock:
            prompt: list[int] = request["prompt"]
            tokens, logprobs = self._sample(prompt, request)
            choice = {
                "token_ids": tokens,
                "logprobs": {"token_logprobs": logprobs},
                "finish_reason": "stop" if tokens[-1] == self.end else "length",
            }
            if request.get("prompt_logprobs") is not None:
                rows = self._logprobs(prompt)[:-1]
                of_tokens = []
                for token, row in zip(prompt[1:], rows, strict=True):
                    of_tokens.append({str(token): {"logprob": float(row[token])}})
                choice["prompt_logprobs"] = [None, *of_tokens]
            return choice

    def _sample(self, prompt: list[int], request: dict[str, Any]) -> tuple[list[int], list[float]]:
        random = torch.Generator().manual_seed(request.get("seed") or 0)
        temperature = request["temperature"]
        tokens: list[int] = []
        logprobs: list[float] = []
        while len(tokens) < request["max_tokens"] and self.end not in tokens:
            row = self._logprobs([*prompt, *tokens], temperature or 1.0)[-1]
            if temperature == 0:
                token = int(row.argmax())
            else:
                cumulative = row.double().exp().cumsum(-1)
                point = torch.rand(1, generator=random, dtype=torch.float64) * cumulative[-1]
                token = min(int(torch.searchsorted(cumulative, point, right=True)), len(row) - 1)
            tokens.append(token)
            logprobs.append(float(row[token]))
        return tokens, logprobs

    def _logprobs(self, ids: list[int], temperature: float = 1.0) -> torch.Tensor:
        logits: torch.Tensor = self.model(input_ids=torch.tensor([ids])).logits[0].float()
        return (logits / temperature).log_softmax(-1)


class Handler(JsonHandler, BaseHTTPRequestHandler):
    engine: Engine

    def do_GET(self) -> None:
        if self.headers["authorization"] != f"Bearer {os.environ[KEY]}":
            self.answer(401, {})
        elif self.path == "/v1/models":
            self.answer(200, {"data": [{"id": "m", "max_model_len": LONGEST}]})
        else:
            self.answer(200, {})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        if self.path == "/v1/completions":
            self.answer(200, {"choices": [self.engine.complete(json.loads(body))]})
        elif self.path == "/collective_rpc":
            call = json.loads(body)
            result = getattr(self.engine, call["method"])(*call.get("args", ()))
            self.answer(200, {"results": [result]})
        else:  # pauses and caches, of which it has none
            self.answer(200, {})


def main() -> None:
    host, port, folder = sys.argv[1:4]
    exit_with_parent(int(os.environ["SKYRL_FAST_PARENT"]))
    torch.set_num_threads(1)
    print("GPUs:", os.environ.get("CUDA_VISIBLE_DEVICES"), flush=True)
    Handler.engine = Engine(Path(folder))
    ThreadingHTTPServer((host, int(port)), Handler).serve_forever()


if __name__ == "__main__":
    main()
