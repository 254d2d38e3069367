#!/usr/bin/env bash
# Trains on the workers of TPU slices, which may be preempted and come back under the same names. Run it on a
# machine that stays and that they can reach: a small VM in their network.
#
#   SLICES="a b" launch/tpu_pod.sh train.py --workdir /mnt/run
#
# SLICES    names of TPU VMs (those of queued resources are some, too)
# WORKERS   hosts of each                                               (1)
# MIN       hosts without which it waits                                (those of one slice)
# FOLDER    of the script on the workers, which have the same versions  (the path of this one)
# ENDPOINT  how they reach this machine, HOST:PORT                      (its name, 29400)
# ZONE      of the slices                                               (that of gcloud's settings)
# Exit codes: 0 done, 143 saved and wants a restart, 75 not saved, 1 a bug, 2 wrong usage.
set -uom pipefail   # -m: each slice's commands are a process group

if [ $# -eq 0 ] || [ -z "${SLICES:-}" ]; then sed -n '2,13s/^# \{0,1\}//p' "$0" >&2; exit 2; fi
read -ra slices <<< "$SLICES"
endpoint=${ENDPOINT:-$(hostname):29400} workers=${WORKERS:-1} all=(--worker=all ${ZONE:+--zone="$ZONE"})
export JAXGOODPUT_SECRET=${JAXGOODPUT_SECRET:-$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')}
secret=$(mktemp) && trap 'rm -f "$secret"' EXIT
echo "$JAXGOODPUT_SECRET" > "$secret"   # to be copied: command lines are there for all to read

jaxgoodput run --nnodes "${MIN:-$workers}:$((${#slices[@]} * workers))" --local-hosts 0 \
    --rdzv-endpoint "$endpoint" -- python "$@" & job=$!
trap 'kill -TERM "$job"' INT TERM
agents() {   # of one slice, and again when it has come back
    local agent="python3 -m jaxgoodput.cli agent --secret-stdin --name $1-\$(hostname)"
    local command="cd $(printf %q "${FOLDER:-$PWD}") && exec $agent --rdzv-endpoint $endpoint"
    while kill -0 "$job"; do
        gcloud compute tpus tpu-vm scp "$secret" "$1:.jaxgoodput" "${all[@]}" &&
            gcloud compute tpus tpu-vm ssh "$1" "${all[@]}" --ssh-flag=-oServerAliveInterval=15 \
                --command="$command -- python $(printf '%q ' "${@:2}") < ~/.jaxgoodput"
        timeout 30 tail --pid="$job" -f /dev/null
    done < /dev/null
}
for slice in "${slices[@]}"; do agents "$slice" "$@" & started+=($!); done
while wait "$job"; code=$?; kill -0 "$job" 2> /dev/null; do :; done   # a signal interrupts wait
for pid in "${started[@]}"; do timeout 15 tail --pid="$pid" -f /dev/null; kill -- "-$pid"; done 2> /dev/null
exit "$code"
