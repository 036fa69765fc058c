"""Two `vllm serve` processes for one run; one of them is killed during the run and restarted.

    python examples/asynchronous/two_servers.py --base work --steps 80

Exits with an error unless the run finishes with all its groups, both servers were used, the death
and the restart are in log and metrics, and both have the trainer's last weights.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples.asynchronous.quickstart_run import (
    CONFIG,
    environment,
    prepare,
    settings,
    start,
    trained,
)
from skyrl_fast.rollout.engine.serve_vllm import PARENT_VARIABLE
from skyrl_fast.train.output.loggers import read_metrics

END_SECONDS = 20.0  # for a server to exit by itself
SMALL = [
    "trainer.train_batch_size=4",
    "trainer.policy_mini_batch_size=4",
    "trainer.eval_before_train=false",
    "trainer.eval_interval=-1",
    "trainer.ckpt_interval=-1",
    "data.val_data=[]",
    "generator.n_samples_per_prompt=4",
    "generator.inference_engine.num_threads=1",
]


def main() -> None:
    """Start both servers, train, kill one, restart it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base", type=Path, default=Path("asynchronous"))
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument(
        "--weight-sync",
        choices=("file", "reload"),
        default="file",
        help="how servers load weights; reload does not update the quickstart's tied head on CPU",
    )
    parser.add_argument("--lora", action="store_true", help="train and send a LoRA adapter")
    options = parser.parse_args()
    base: Path = options.base.resolve()
    base.mkdir(parents=True, exist_ok=True)
    prepare(base)
    shutil.rmtree(base / "servers", ignore_errors=True)
    (base / "servers.log").unlink(missing_ok=True)
    ports = free_ports(2)
    lora = ["trainer.policy.model.lora.rank=8"] if options.lora else []
    servers = [serve(base, port, *lora) for port in ports]
    process = None
    try:
        urls = ",".join(f"'http://127.0.0.1:{port}'" for port in ports)
        chosen = [
            *settings("servers", staleness=2),
            *SMALL,
            *lora,
            f"trainer.max_training_steps={options.steps}",
            f"generator.inference_engine.external_server_urls=[{urls}]",
            f"generator.inference_engine.weight_sync_backend={options.weight_sync}",
        ]
        process = start(base, chosen, log="servers.log")
        wait_for_step(process, base, options.steps // 3)
        servers[0].send_signal(signal.SIGKILL)
        servers[0].wait()
        print(f"killed the server on port {ports[0]}", flush=True)
        servers[0] = serve(base, ports[0], *lora)
        code = process.wait()
    finally:
        for one in (*servers, process):
            if one is not None:
                end(one)
    problems = find_problems(base, options.steps, code)
    print("\n".join(problems) or "all checks passed")
    sys.exit(bool(problems))


def serve(base: Path, port: int, *overrides: str) -> subprocess.Popen[bytes]:
    """Start `skyrl-fast engine`."""
    command = [sys.executable, "-m", "skyrl_fast", "engine", str(CONFIG), "--port", str(port)]
    command.append("trainer.run_path=servers")  # its key
    with (base / f"server_{port}.log").open("ab") as file:
        return subprocess.Popen(
            [*command, *SMALL, *overrides],
            cwd=base,
            stdout=file,
            stderr=file,
            env=environment() | {PARENT_VARIABLE: str(os.getpid())},
            start_new_session=True,
        )


def end(process: subprocess.Popen[bytes]) -> None:
    """Terminate a process; if it does not exit in time, kill it and its process group."""
    process.terminate()
    try:
        process.wait(timeout=END_SECONDS)
    except subprocess.TimeoutExpired:
        if os.getpgid(process.pid) == process.pid:
            os.killpg(process.pid, signal.SIGKILL)
        else:
            process.kill()
        process.wait()


def free_ports(number: int) -> list[int]:
    """Return ports that are free now."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(number)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def wait_for_step(process: subprocess.Popen[bytes], base: Path, step: int) -> None:
    """Return when the run has reached the step, or is over."""
    while process.poll() is None:
        rows = read_metrics(base / "servers/metrics.jsonl")
        if rows and rows[-1]["step"] >= step:
            return
        time.sleep(0.2)


def find_problems(base: Path, steps: int, code: int) -> list[str]:
    """Return descriptions of failed checks; print the counts."""
    problems = [] if code == 0 else [f"exited with {code}: see {base / 'servers.log'}"]
    rows = [row for row in read_metrics(base / "servers/metrics.jsonl") if "timing/step" in row]
    if len(rows) != steps or len(trained(base / "servers")) != 16 * steps:
        problems.append(f"{len(rows)} of {steps} steps, {len(trained(base / 'servers'))} samples")
    faults = {name: value for name, value in rows[-1].items() if name.startswith("faults/")}
    print("\n".join(f"{name} {value:.0f}" for name, value in sorted(faults.items())))
    log = (base / "servers.log").read_text(encoding="utf-8", errors="replace")
    if not faults.get("faults/engine_deaths") or "DEAD: the server" not in log:
        problems.append("the death of a server is missing in metrics or log")
    back = [row["step"] for row in rows if row["faults/engine_restarts"]]
    print(f"restarted by step {back[0]}" if back else "not restarted before the end")
    worst = max(row["sync/logprob_abs_diff_max"] for row in rows)
    print(f"largest |engine - trainer| of a probe's logprobs, both servers: {worst:.2g}")
    return problems


if __name__ == "__main__":
    main()
