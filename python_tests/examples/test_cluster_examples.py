"""The files of examples/cluster: schemas, and the Slurm script with stubs of Slurm and Ray."""

import os
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml

FOLDER = Path(__file__).resolve().parents[2] / "examples/cluster"
JOB = {"SLURM_JOB_NODELIST": "node[1-3]", "SLURM_JOB_NUM_NODES": "3", "SLURM_JOB_ID": "1230042"}


def load(name: str) -> Any:
    return yaml.safe_load((FOLDER / name).read_text(encoding="utf-8"))


def test_cluster_file_is_valid_for_ray_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("ray")
    pytest.importorskip("jsonschema")
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))  # Ray notes the nodes of a local cluster there
    from ray.autoscaler._private.util import prepare_config, validate_config

    written = load("ray-up.yaml")
    workers = len(written["provider"]["worker_ips"])
    assert (written["min_workers"], written["max_workers"]) == (workers, workers)
    config = prepare_config(written)
    validate_config(config)
    (node,) = config["available_node_types"].values()
    assert node["max_workers"] == workers
    with pytest.raises(Exception, match="head_start"):
        validate_config({**config, "head_start": []})


def test_job_of_kubernetes_has_what_kuberay_wants() -> None:
    job = load("rayjob.yaml")
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    spec = job["spec"]
    assert spec.keys() <= {
        "entrypoint",
        "backoffLimit",
        "shutdownAfterJobFinishes",
        "runtimeEnvYAML",
        "rayClusterSpec",
    }
    cluster = spec["rayClusterSpec"]
    assert tuple(map(int, cluster["rayVersion"].split("."))) >= (2, 52, 0)  # has tokens
    assert cluster["authOptions"] == {"mode": "token"}
    (workers,) = cluster["workerGroupSpecs"]
    assert workers["minReplicas"] <= workers["replicas"] <= workers["maxReplicas"]
    nodes = 1 + workers["replicas"]
    command = spec["entrypoint"].split()
    assert command[:2] == ["skyrl-fast", "train"] and "--resume" in command
    settings = dict(word.split("=") for word in command if "=" in word)
    assert settings["trainer.placement.policy_num_nodes"] == str(nodes)
    per_node = settings["trainer.placement.policy_num_gpus_per_node"]
    for group in (cluster["headGroupSpec"], workers):
        assert group["rayStartParams"] == {}
        pod = group["template"]["spec"]
        (container,) = pod["containers"]
        assert container["resources"]["limits"] == container["resources"]["requests"]
        assert container["resources"]["limits"]["nvidia.com/gpu"] == per_node
        mounted = {mount["name"] for mount in container["volumeMounts"]}
        assert mounted == {volume["name"] for volume in pod["volumes"]}
    assert isinstance(yaml.safe_load(spec["runtimeEnvYAML"]), dict)


STUBS = {
    # options, then the command
    "srun": 'echo "srun $*" >>$LOG; while [[ $1 == --* ]]; do shift; done; exec "$@"',
    "scontrol": '[[ "$*" == "show hostnames node[1-3]" ]] && printf "node1\\nnode2\\nnode3\\n"',
    "hostname": "echo 10.0.0.1 fd00::1",
    "ray": 'echo "ray $* $RAY_ADDRESS $RAY_AUTH_MODE ${#RAY_AUTH_TOKEN}" >>$LOG\n'
    "[[ $1 == status ]] || exec sleep 60",
    "skyrl-fast": 'echo "skyrl-fast $*" >>$LOG; trap "echo TERM >>$LOG; exit 143" TERM\n'
    "until [[ $(grep -c '^ray start' $LOG) == $STARTS && ! -e $HOLD ]]; do sleep 0.05; done\n"
    'exit "$CODE"',
}


def start(folder: Path, *arguments: str, hold: bool = False, **variables: str) -> Any:
    """Start the script on stubs, which write their calls to `log`; `hold` keeps the run going."""
    for name, body in STUBS.items():
        (folder / name).write_text(f"#!/bin/bash\n{body}\n")
        (folder / name).chmod(0o755)
    if hold:
        (folder / "hold").touch()
    environment = {
        "PATH": f"{folder}:{os.environ['PATH']}",
        "LOG": str(folder / "log"),
        "HOLD": str(folder / "hold"),
        "CODE": "7",
        "STARTS": "2",
        **JOB,
        **variables,
    }
    return subprocess.Popen(
        ["bash", str(FOLDER / "slurm.sh"), *arguments],
        env=environment,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def calls(folder: Path) -> list[str]:
    return (folder / "log").read_text().splitlines()


def left(process: Any, *, seconds: float = 10.0) -> list[str]:
    """Return the processes in the session of an ended script that do not end within a time."""
    deadline = time.monotonic() + seconds
    found = running(process)
    while found and time.monotonic() < deadline:  # what was killed may need a core to end
        time.sleep(0.05)
        found = running(process)
    return found


def running(process: Any) -> list[str]:
    """Return the processes in the session of a process."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(FileNotFoundError, ProcessLookupError):  # it has ended
            state, _, _, session, *_ = (folder / "stat").read_text().rpartition(") ")[2].split()
            if session == str(process.pid) and state != "Z":
                found.append(folder.name)
    return found


def test_slurm_script_starts_a_ray_node_on_each_node_and_the_run(tmp_path: Path) -> None:
    script = start(tmp_path, "config.yaml", "trainer.seed=7")
    _, errors = script.communicate(timeout=60)
    assert script.returncode == 7, errors
    lines = calls(tmp_path)
    token = "10.0.0.1:20042 token 64"
    head = "ray start --head --node-ip-address=10.0.0.1 --port=20042 --block"
    assert f"{head} {token}" in lines
    assert f"ray start --address=10.0.0.1:20042 --block {token}" in lines
    run = "skyrl-fast train config.yaml --resume trainer.placement.policy_num_nodes=3"
    assert f"{run} trainer.seed=7" in lines
    (others,) = (line for line in lines if "--exclude" in line)
    assert "--nodes=2 --ntasks=2 --exclude=node1" in others
    assert left(script) == []


def test_slurm_script_of_one_node_starts_no_others(tmp_path: Path) -> None:
    script = start(tmp_path, "config.yaml", SLURM_JOB_NUM_NODES="1", CODE="0", STARTS="1")
    script.communicate(timeout=60)
    assert script.returncode == 0
    assert not any("--exclude" in line for line in calls(tmp_path))


def test_signal_of_slurm_reaches_the_run_which_saves_first(tmp_path: Path) -> None:
    script = start(tmp_path, "config.yaml", hold=True)
    deadline = time.monotonic() + 30
    while not (tmp_path / "log").exists() or "skyrl-fast" not in (tmp_path / "log").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    time.sleep(0.3)  # the stub sets its trap
    os.kill(script.pid, signal.SIGTERM)  # to the script alone, as --signal=B:TERM does
    script.communicate(timeout=60)
    assert script.returncode == 143 and calls(tmp_path)[-1] == "TERM"
    assert left(script) == []


@pytest.mark.parametrize("missing", [*JOB, "config"])
def test_slurm_script_names_what_is_missing(tmp_path: Path, missing: str) -> None:
    script = start(tmp_path, *(["config.yaml"] if missing != "config" else []), **{missing: ""})
    _, errors = script.communicate(timeout=60)
    assert script.returncode != 0 and missing in errors.replace("CONFIG", "config")
