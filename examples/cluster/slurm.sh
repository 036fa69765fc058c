#!/bin/bash
# A run on nodes of a Slurm cluster, a Ray node on each:
#   sbatch --nodes=2 examples/cluster/slurm.sh config.yaml [key=value ...]
# The job may be sent again: it resumes from the newest checkpoint.
#SBATCH --job-name=skyrl-fast
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --signal=B:TERM@600
#SBATCH --requeue
set -euo pipefail

config=${1:?usage: sbatch slurm.sh CONFIG [key=value ...]}
shift
: "${SLURM_JOB_NODELIST:?}" "${SLURM_JOB_NUM_NODES:?}" "${SLURM_JOB_ID:?}"
# Ray's own ports accept this job's processes only (Ray 2.52 or newer).
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN
RAY_AUTH_TOKEN=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
head=${nodes[0]} # where this script runs, too
addresses=$(srun --overlap --nodes=1 --ntasks=1 --nodelist="$head" hostname --ip-address)
port=$((20000 + SLURM_JOB_ID % 10000)) # another job may have had the node
export RAY_ADDRESS=${addresses%% *}:$port

srun --overlap --nodes=1 --ntasks=1 --nodelist="$head" \
  ray start --head --node-ip-address="${addresses%% *}" --port="$port" --block &
ray_nodes=($!)
trap 'kill "${ray_nodes[@]}" 2>/dev/null || true' EXIT
if ((SLURM_JOB_NUM_NODES > 1)); then
  others=$((SLURM_JOB_NUM_NODES - 1))
  srun --overlap --nodes="$others" --ntasks="$others" --exclude="$head" \
    bash -c "until ray status >/dev/null 2>&1; do sleep 1; done; ray start --address=$RAY_ADDRESS --block" &
  ray_nodes+=($!)
fi
for _ in {1..60}; do
  ray status >/dev/null 2>&1 && break
  sleep 1
done

skyrl-fast train "$config" --resume trainer.placement.policy_num_nodes="$SLURM_JOB_NUM_NODES" "$@" &
run=$!
trap 'kill -TERM "$run"' TERM # ten minutes before the end of the time: a checkpoint
while true; do # a signal ends the first wait
  wait "$run" && code=0 || code=$?
  kill -0 "$run" 2>/dev/null || break
done
exit "$code"
