#!/usr/bin/env bash
# What one NVIDIA machine says: device, step overhead, batch switches with the memory bound, moves, time to target.
#
#     benchmarks/on_gpu.sh [python]      # about 8 minutes; every table is text on stdout
#
# Each table has a time limit of its own, and one that fails or is late does not keep the others from being
# printed; the exit status then says so. Moves need two GPUs at least.
set -uo pipefail
cd "$(dirname "$0")/.."
python=${1:-python}
failed=0

table() { # seconds, then the command
    local limit_s=$1
    shift
    echo "## $*"
    timeout "$limit_s" "$python" "$@" || { echo "missing: ended with status $?"; failed=1; }
}

"$python" -c 'import jax; d = jax.devices(); print(f"# {len(d)} x {d[0].device_kind}, jax {jax.__version__}")'
num_devices=$("$python" -c 'import jax; print(jax.device_count())')
for row in mlp:1 cnn:1 "byte LM:1"; do table 75 benchmarks/step_overhead.py --only "$row" --rounds 3; done
table 60 benchmarks/batch_switch.py
if [ "$num_devices" -gt 1 ]; then table 60 benchmarks/reshard.py --devices gpu --rounds 3; fi
table 60 benchmarks/time_to_target.py --workloads digits --seeds 3 --sides adaptive,"fixed 32","fixed 64"
table 120 benchmarks/time_to_target.py --workloads recommender --seeds 2 --sides adaptive,"fixed 4096","fixed 8192"
exit "$failed"
