#!/usr/bin/env bash
# What a GPU has to show, in pieces of less than ten minutes each, where 16 cores and one GPU do the work and the package
# is installed:
#
#     benchmarks/gpu.sh tests OUT       # everything that the default tests have for a GPU
#     benchmarks/gpu.sh sanitize OUT    # every kernel under compute-sanitizer
#     benchmarks/gpu.sh profile OUT     # kernels of attention and of a sum under Nsight Compute
#     benchmarks/gpu.sh tiles OUT       # sums by what programs take of rows and columns
#     benchmarks/gpu.sh layers OUT      # tables of layers, the largest graphs last
#     benchmarks/gpu.sh epochs OUT      # training steps in shards; when an ordinary edge_index is worth a graph
#     benchmarks/gpu.sh offload OUT     # rows at home in pinned memory, beside rows on the GPU
#     benchmarks/gpu.sh workers OUT     # the example on one worker (NCCL) and on two that share the GPU (gloo); a trace
set -euo pipefail
cd "$(dirname "$0")/.."
piece=$1 out=$(realpath -m "$2")
mkdir -p "$out"
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
python=${PYTHON:-python3}

case $piece in
tests)
    # Plugins of benchmarks warn, and warnings are errors here. Should time be up, what failed is told.
    timeout --signal=INT 560 "$python" -m pytest -p no:benchmark -v --tb=short -n 8 --dist worksteal \
        -k "gpu or cuda or triton" \
        test/ops test/reduce test/nn/conv test/nn/replay test/integration/test_cuda.py test/integration/test_devices.py \
        test/distributed/test_staging.py test/offload test/data/test_hetero.py test/integration/test_faults.py 2>&1 | tee "$out/tests.log"
    ;;
sanitize)
    for tool in memcheck racecheck initcheck; do
        PYTORCH_NO_CUDA_MEMORY_CACHING=1 timeout 180 compute-sanitizer --tool $tool "$python" test/support/every_kernel.py \
            2>&1 | tee "$out/sanitize-$tool.log" &
        jobs+=($!)
    done
    status=0
    for job in "${jobs[@]}"; do wait "$job" || status=1; done
    exit $status
    ;;
profile)
    sections="SpeedOfLight MemoryWorkloadAnalysis Occupancy WarpStateStats SchedulerStats LaunchStats"
    ncu --clock-control none --profile-from-start off $(printf -- "--section %s " $sections) \
        -k 'regex:_attention|_sources|_scores|_gatv2_queries|_sum' "$python" benchmarks/gpu_layers.py --profile \
        --nodes 600000 --edges 15500000 --cases gat-2 gatv2 sum-128 >"$out/profile.log" 2>&1
    ;;
tiles)
    "$python" benchmarks/gpu_tiles.py --out "$out"
    ;;
layers)  # five runs, of which the last ones may not fit ten minutes: what is done is in OUT
    run="$python benchmarks/gpu_layers.py --repetitions 5 --out $out --errors $out/errors.json"
    status=0
    $run --nodes 600000 --edges 15500000 || status=1
    $run --nodes 600000 --edges 15500000 --cases gat-4x32 sage gcn gin --implementations pyg_sar "PyG compiled" --out "$out/compiled" || status=1
    $run --nodes 600000 --edges 15500000 --peers --errors "$out/errors-peers.json" || status=1
    $run || status=1
    $run --nodes 230000 --edges 114000000 || status=1
    exit $status
    ;;
epochs)
    "$python" benchmarks/gpu_break_even.py --out "$out"
    "$python" benchmarks/shards.py --device cuda --rounds 1 --steps 3 --ways captured compiled "sparse matrix" mini-batches \
        --out "$out"
    ;;
offload)
    "$python" benchmarks/gpu_offload.py --out "$out"
    ;;
workers)
    parts=$(mktemp -d)
    for workers in 1 2; do
        "$python" -m pyg_sar partition Community/20000/200000 --num-parts $workers --out "$parts/$workers"
        "$python" -m torch.distributed.run --standalone --nproc-per-node $workers examples/train.py "$parts/$workers" \
            --model gat --hidden 16 --epochs 5 --dropout 0 --device cuda 2>&1 | tee "$out/workers-$workers.log"
    done
    "$python" benchmarks/gpu_overlap.py --out "$out"
    ;;
*)
    echo "There is no piece '$piece': tests, sanitize, profile, tiles, layers, epochs, offload or workers." >&2
    exit 2
    ;;
esac
