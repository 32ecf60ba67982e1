#!/usr/bin/env bash
# Four hosts under Slurm, a worker on each: sbatch examples/multi_node.sh examples/train.py parts/products-4
# Without Slurm run on each host: HOST=first-host NODES=4 bash examples/multi_node.sh examples/train.py parts/products-4
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
set -euo pipefail

nodes=${SLURM_NNODES:-${NODES:-1}}
if [[ -n ${SLURM_JOB_NODELIST:-} ]]; then
  host=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p) # reads all: a pipe that closes early would end this script
  run=(srun)
else
  host=${HOST:-localhost}
  run=()
fi
# Workers of one host share its processors; each must see the folder of parts under the same path.
"${run[@]}" python -m torch.distributed.run --nnodes "$nodes" --nproc-per-node "${WORKERS:-1}" \
  --rdzv-backend c10d --rdzv-endpoint "$host:${PORT:-29500}" --rdzv-id "${SLURM_JOB_ID:-pyg_sar}" --max-restarts 3 \
  "$@"
