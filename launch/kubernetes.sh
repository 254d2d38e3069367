#!/usr/bin/env bash
# Installs a cluster on Kubernetes, trains a job that grows and shrinks while a machine is drained, and removes all.
# UNTESTED: no real cluster was at hand. It needs kubectl, a volume claim that all pods can write to, and an image
# (launch/Dockerfile) in which /app/train.py is a script that takes --workdir.
#
#   launch/kubernetes.sh me/mine runs [NAMESPACE [nodes|pods [options of `jaxgoodput manifests`]]]
#
set -euo pipefail
image=$1 volume=$2 space=${3:-default} jobs=${4:-pods}
folder=$(mktemp -d) port=${PORT:-8765}
jaxgoodput manifests --image "$image" --volume "$volume" --namespace "$space" --jobs "$jobs" \
    --out "$folder" --nodes "${NODES:-2}" --devices "${DEVICES:-2}" --kind "${KIND:-cpu}" "${@:5}"
forward=
trap '[ -z "$forward" ] || kill "$forward" || true; kubectl delete -k "$folder"; rm -r "$folder"' EXIT
kubectl apply -k "$folder"
kubectl rollout status -n "$space" statefulset/jaxgoodput-service --timeout=10m
[ "$jobs" = pods ] && agents=deployment/jaxgoodput-pods || agents=statefulset/jaxgoodput-node
kubectl rollout status -n "$space" "$agents" --timeout=10m
kubectl port-forward -n "$space" service/jaxgoodput-service "$port:8765" & forward=$!
until curl -sf --cacert "$folder/ca.crt" "https://localhost:$port/healthz"; do sleep 1; done
ask() { jaxgoodput "$1" --scheduler "https://localhost:$port" --ca "$folder/ca.crt" \
    --token-file "$folder/operator-token" "${@:2}"; }
# The command starts in the folder that it is submitted from, which has to be one of the image's.
submit() { (cd "${CWD:-/tmp}" && ask submit --name "$1" --min 1 --max 4 -- python /app/train.py \
    --workdir "/jaxgoodput/work/$1"); }
submit a; submit b  # b makes a shrink
sleep "${WAIT_S:-60}"; ask status --once
machine=$(kubectl get pods -n "$space" -l app.kubernetes.io/name=jaxgoodput -o \
    jsonpath='{.items[-1:].spec.nodeName}')
if [ "${DRAIN:-no}" = yes ]; then # evicts all pods of that machine
    kubectl drain "$machine" --ignore-daemonsets --delete-emptydir-data --timeout=10m
    kubectl uncordon "$machine"
fi
ask logs -f a; ask logs -f b
ask status --once
