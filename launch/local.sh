#!/usr/bin/env bash
# Trains on this host with several processes, and starts again whenever the job asks for it.
#
#   launch/local.sh train.py --workdir /tmp/run
#   PROCESSES=4 DEVICES=2 launch/local.sh train.py --workdir /tmp/run
#
# PROCESSES  how many                                          (2)
# DEVICES    of each: virtual ones on CPU, else GPUs           (1)
# RESTARTS   how often to start again after 143 or a crash     (10)
# GRACE_S    seconds to save between a stop signal and SIGKILL (60)
# Exit codes: 0 done, 143 saved and wants a restart, 75 not saved, 1 a bug, 2 wrong usage.
set -euo pipefail

if [ $# -eq 0 ]; then
    sed -n '2,11s/^# \{0,1\}//p' "$0" >&2
    exit 2
fi

exec jaxgoodput run \
    --nproc-per-node "${PROCESSES:-2}" \
    --devices-per-process "${DEVICES:-1}" \
    --max-restarts "${RESTARTS:-10}" \
    --grace-s "${GRACE_S:-60}" \
    -- python "$@"
