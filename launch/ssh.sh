#!/usr/bin/env bash
# Trains on the hosts of a file through ssh, on as many as answer; they may die, leave and come back.
#
#   launch/ssh.sh hosts.txt train.py --workdir /shared/run
#   MIN=2 PROCESSES=4 launch/ssh.sh hosts.txt train.py --workdir /shared/run
#
# hosts.txt  one a line, as [USER@]HOST[:PORT] [slots=N]; the script lies in the same folder on all of them, with the same versions
# MIN        hosts without which it waits                      (1)
# PROCESSES  of each host                                      (1)
# DEVICES    of each process: virtual ones on CPU, else GPUs   (1; all where PROCESSES is 1)
# ENDPOINT   how the hosts reach this one, HOST:PORT           (its name, a free port)
# RSH        the remote shell, called as RSH [-p PORT] HOST COMMAND (ssh -o BatchMode=yes)
# Exit codes: 0 done, 143 saved and wants a restart, 75 not saved, 1 a bug, 2 wrong usage.
set -euo pipefail

if [ $# -lt 2 ]; then
    sed -n '2,13s/^# \{0,1\}//p' "$0" >&2
    exit 2
fi
hosts=$1
shift
most=$(sed 's/#.*//' "$hosts" | grep -c '[^[:space:]]')

exec jaxgoodput run \
    --nnodes "${MIN:-1}:$most" \
    --hostfile "$hosts" \
    --rsh "${RSH:-ssh -o BatchMode=yes}" \
    --nproc-per-node "${PROCESSES:-1}" \
    ${DEVICES:+--devices-per-process "$DEVICES"} \
    ${ENDPOINT:+--rdzv-endpoint "$ENDPOINT"} \
    -- python "$@"
