"""A Tinker server in a process of its own, which is killed and started again."""

import asyncio
import os
import signal
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from _tinker import KEY, TorchSampler, make_tiny_service

from skyrl_fast.tinker.checkpoints import CheckpointStore
from skyrl_fast.tinker.start import serving
from skyrl_fast.tinker.training import AdapterTrainer
from skyrl_fast.train.model.optimizer import Optimizer

# Where a server dies, by the kind of call: the function, and whether it has returned.
MOMENTS: dict[str, tuple[Any, str, bool]] = {
    "forward_backward before": (AdapterTrainer, "forward_backward", False),
    "forward_backward inside": (AdapterTrainer, "_run", True),
    "forward_backward after": (AdapterTrainer, "forward_backward", True),
    "optim_step before": (AdapterTrainer, "optim_step", False),
    "optim_step inside": (Optimizer, "step", True),
    "optim_step after": (AdapterTrainer, "optim_step", True),
    "save_state before": (AdapterTrainer, "save", False),
    "save_state inside": (AdapterTrainer, "save", True),
    "save_state after": (CheckpointStore, "_rename", True),
}
STARTS_IN = 120.0  # seconds

# Its processes begin with what these have imported, which takes longer than anything else.
_context = get_context("forkserver")
_context.set_forkserver_preload(
    [
        "_tinker_process",
        "peft",
        "skyrl_fast.train.model.models",
        "tinker.proto.tinker_public_pb2",
        "transformers.models.qwen2.modeling_qwen2",
        "transformers.models.qwen2.tokenization_qwen2",
    ]
)


class ServerProcess:
    """A server at one address, whose process may die."""

    def __init__(self, model: Path, folder: Path) -> None:
        self._model = model
        self._folder = folder
        self._moment = folder / "moment"  # a file: where to die
        self._process: Any = None
        self._port = 0
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def start(self) -> None:
        self._moment.unlink(missing_ok=True)
        ours, theirs = _context.Pipe()
        arguments = (self._model, self._folder, self._port, self._moment, theirs)
        self._process = _context.Process(target=_serve, args=arguments, daemon=True)
        self._process.start()
        assert ours.poll(STARTS_IN)
        self._port = ours.recv()

    def die_at(self, moment: str) -> None:
        """Let the server kill itself where it next gets to this place."""
        self._moment.write_text(moment)

    def wait(self) -> None:
        """Wait for the death of the process."""
        self._process.join(STARTS_IN)
        assert self._process.exitcode == -signal.SIGKILL

    def kill(self) -> None:
        self._process.kill()
        self._process.join(STARTS_IN)


def _serve(model: Path, folder: Path, port: int, moment: Path, pipe: Any) -> None:
    for name, (owner, function, has_returned) in MOMENTS.items():
        wrapped = _killing(getattr(owner, function), name, moment, has_returned)
        setattr(owner, function, wrapped)

    async def serve() -> None:
        service = make_tiny_service(model, folder, TorchSampler(model, 0))
        async with serving(service, KEY, port=port) as url:
            pipe.send(int(url.rpartition(":")[2]))
            await asyncio.Event().wait()

    asyncio.run(serve())


def _killing(
    function: Callable[..., Any], name: str, moment: Path, has_returned: bool
) -> Callable[..., Any]:
    def is_now() -> bool:
        return moment.is_file() and moment.read_text() == name

    def wrapped(*arguments: Any, **options: Any) -> Any:
        if not has_returned and is_now():
            os.kill(os.getpid(), signal.SIGKILL)
        result = function(*arguments, **options)
        if has_returned and is_now():
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    return wrapped
