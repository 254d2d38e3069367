"""The commands about clusters: `jaxgoodput serve`, `node`, `submit`, `status` and so on, and their options.

`terminal.py` carries them out; it is imported only when one of them is called.
"""

import argparse
from collections.abc import Callable
from typing import TypeVar
from urllib.parse import urlsplit

from jaxgoodput._commands import (
    Action,
    Commands,
    OneOf,
    Option,
    argument,
    file,
    folder,
    number,
    switch,
    text,
)
from jaxgoodput._fields.typed import shortened
from jaxgoodput.launcher.variables import variable

T = TypeVar("T")


def _name(text: str) -> str:
    """Parse a name that can be part of a path, as an argparse type."""
    from jaxgoodput.cluster.service.wire import check_name

    try:
        check_name(text, "this")
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def _url(text: str) -> str:
    """Parse the address of a service, as an argparse type."""
    try:
        parts = urlsplit(text)
        is_right = (
            parts.scheme in ("http", "https") and parts.hostname and not parts.path.strip("/")
        )
        is_right = is_right and parts.port != 0
    except ValueError:  # raised for the port, and for brackets
        is_right = False
    if not is_right:
        raise argparse.ArgumentTypeError(
            f"{shortened(text)}: expected http://HOST:PORT or https://HOST:PORT, as `jaxgoodput serve` "
            "prints it"
        )
    return text


def _node_label(text: str) -> tuple[str, str]:
    """Parse a label of nodes, as an argparse type."""
    from jaxgoodput.cluster.service.kubernetes.pods import node_label

    return _argument(node_label, text)


def _toleration(text: str) -> dict[str, str]:
    """Parse a toleration of taints, as an argparse type."""
    from jaxgoodput.cluster.service.kubernetes.pods import toleration

    return _argument(toleration, text)


def _argument(parse: Callable[[str], T], text: str) -> T:
    try:
        return parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


# fmt: off
_FOLDER = text("--folder", "DIR", "folder of the service (default: .jaxgoodput/service in the home folder)",
               type=folder)
# fmt: on

# How a command finds the service.
_CONNECTION = (
    text("--scheduler", "URL", "address of the service (default: the service that was last started with this "
         "--folder)", type=_url),
    text("--token-file", "F", "file that holds the token (default: the one in the "
         "--folder)", type=file),
    text("--ca", "F", "certificate authority that signed the service's certificate, if this system does "
         "not know it", type=file),
    _FOLDER,
)  # fmt: skip

# How a node's agent runs jobs.
_AGENT = (
    text("--kind", "KIND", "kind of the devices, such as h200", "cpu"),
    number("--grace-s", "S", 0.0, "seconds that a stopped process may take to save its state", 60.0),
    number("--hints-s", "S", 0.1, "seconds between two looks at what jobs measured", 5.0),
    number("--join-s", "S", 0.0, "seconds that the start of a job waits for more than its minimum of "
           "devices", 3.0),
)  # fmt: skip

_SERVE = (
    _FOLDER,
    text("--local", "NODESxDEVICES", "nodes to simulate on this machine; 0: none (default: 1 with a device "
         "per processor)"),
    *_AGENT,
    text("--host", "HOST", "address to listen on", "127.0.0.1"),
    number("--port", "PORT", 0, "port to listen on; 0: any free one", 8765, most=65535),
    text("--tokens", "F", 'JSON file: {"tokens": [{"token": ..., "tenant": ..., "role": '
         '"user|node|operator"}, ...]} (default: one operator token, made in the folder)', type=file),
    text("--tls-certificate", "F", "certificate of the service, for HTTPS", type=file),
    text("--tls-key", "F", "private key of the certificate", type=file),
    text("--policy", "NAME", "scheduling policy, see `jaxgoodput simulate --list`", "goodput"),
    text("--sharing", "F", "JSON file with tenants, quota, reservations and price_per_hour, as in a "
         "ClusterSpec",
         type=file),
    number("--min-gap-s", "S", 0.0, "minimum seconds between two plans", 5.0),
    number("--max-gap-s", "S", 1.0, "maximum seconds between two plans", 60.0),
    number("--restart-s", "S", 0.0, "assumed seconds that a change costs, until a job has shown its "
           "own", 10.0),
    number("--silent-s", "S", 1.0, "seconds without a heartbeat after which a node counts as down", 30.0),
    number("--apart-s", "S", 1.0, "seconds for which a node is kept apart from a job that reports it as slow "
           "or broken; doubled each time", 300.0),
    number("--longest-wait-s", "S", 0.1, "seconds for which a request may wait for news, at most 30; lower "
           "it behind a proxy with a shorter timeout", 30.0),
    number("--rate", "N", 1.0, "requests per second that the users of one tenant may make, or one other "
           "token", 1000.0),
    number("--wrong-rate", "N", 1.0, "requests per minute without a valid token that one address may "
           "make", 30.0),
    number("--questions", "N", 1.0, "questions (explain, what-if) per minute that one tenant may ask", 60.0),
    text("--tensorboard", "URL", "TensorBoard to which the page links"),
    switch("--repair", help="keep the events of a damaged journal that precede the damage, set the damaged "
           "files aside, print what is lost, and stop"),
)  # fmt: skip

_ELASTIC_JOBSET = switch(
    "--elastic-jobset", help="if processes are pods: run jobs as JobSets, not as Indexed Jobs; the "
    "controller of JobSets must have its feature gate ElasticJobSet on"
)  # fmt: skip

_NODE = (
    text("--name", "NAME", "name of this node (default: its host name)", type=_name),
    text("--address", "HOST", "address by which other nodes reach this one (default: 127.0.0.1 if the "
         "scheduler is there, else the host name)"),
    text("--label", "LEVEL=DOMAIN", "topology label, such as rack=r3; coordinates= lets coordinators of "
         "jobs run here", [], action="append"),
    text("--pods", "F", "run each process of a job as a pod on Kubernetes, made from this PodTemplate as "
         "JSON; the node's devices are then anywhere in that cluster", type=file),
    text("--resource", "NAME", "with --pods: the Kubernetes resource of the devices, such as "
         "nvidia.com/gpu"),
    _ELASTIC_JOBSET,
    text("--owner", "NAME", "with --pods: the Deployment of this agent, with which Kubernetes deletes its "
         "pods"),
    text("--api", "URL", "with --pods: address of the Kubernetes API", "https://kubernetes.default.svc"),
    text("--api-credentials", "DIR", "with --pods: folder of the files token, namespace and ca.crt",
         "/var/run/secrets/kubernetes.io/serviceaccount", type=folder),
)  # fmt: skip

_NODES = (
    text("--engine", "ENGINE", "what starts the agents: local, slurm or ray", "local",
         choices=("local", "slurm", "ray")),
    number("--count", "N", 1, "number of nodes, with --engine local (default: 1)"),
)  # fmt: skip

# What `node` and `nodes` share.
_DEVICES = (
    number("--devices", "N", 0, "devices of a node; on CPU they are virtual", 1),
    number("--cpus", "N", 0.0, "CPUs of a node for jobs (default: jobs are never short of them)"),
    number("--memory", "GIB", 0.0, "main memory of a node for jobs, in GiB (default: jobs are never short of "
           "it)"),
    number("--alone-s", "S", 30.0, "seconds without contact to the scheduler after which jobs save and end "
           "(default: they continue)"),
    *_AGENT,
    *_CONNECTION,
)  # fmt: skip

_MANIFESTS = (
    text("--image", "IMAGE", "image with jaxgoodput[service] and your programs", required=True),
    text("--out", "DIR", "folder for the manifests and secrets; secrets that are there stay",
         "jaxgoodput-kubernetes", type=folder),
    text("--cluster", "NAME", "name of the cluster, from which its objects get theirs", "jaxgoodput",
         type=_name),
    text("--namespace", "NAME", "namespace to install into; it has to exist", "default", type=_name),
    text("--jobs", "AS", "nodes: jobs run on agents that hold whole nodes; pods: each process of a job is a "
         "pod", "nodes", choices=("nodes", "pods")),
    number("--nodes", "N", 1, "number of nodes", 2),
    number("--devices", "D", 1, "devices of a node", 8),
    text("--kind", "KIND", "kind of the devices; cpu: virtual devices", "gpu"),
    text("--resource", "NAME", "Kubernetes resource that is requested for each device (default: "
         "nvidia.com/gpu; none for --kind cpu)"),
    text("--cpu", "N", "processors of a node's agent, or of each process if they are pods", "8"),
    text("--memory", "SIZE", "memory of the same, /dev/shm included", "32Gi"),
    text("--shm", "SIZE", "size of /dev/shm", "8Gi"),
    text("--node-selector", "KEY=VALUE", "label that machines must have; may be repeated", [],
         type=_node_label, action="append"),
    text("--toleration", "KEY[=VALUE][:EFFECT]", "taint of machines that is accepted; may be repeated "
         "(default: the --resource)", [], type=_toleration, action="append"),
    text("--queue", "NAME", "Kueue queue that admits the agents, or the jobs if they are pods"),
    _ELASTIC_JOBSET,
    text("--volume", "CLAIM", "persistent volume claim for the journal and the workdirs"),
    number("--user", "ID", 1, "number of the user that all processes run as", 1000, most=2**31 - 1),
    number("--grace-s", "S", 1, "seconds that a stopped process may take to save its state", 60,
           most=86_400),
)  # fmt: skip

_SUBMIT = (
    text("--name", "NAME", "name of the job (default: the script's name and a few random letters)",
         type=_name),
    number("--min", "A", 1, "minimum number of devices (default: 1)"),
    number("--max", "B", 1, "maximum number of devices (default: 64)"),
    text("--mode", "MODE", "adaptive: devices and batch change; elastic: the batch is fixed; rigid: the "
         "number of devices is fixed as well, at "
         "--max", "adaptive", choices=("adaptive", "elastic", "rigid")),
    number("--devices-per-process", "D", 1, "devices of each process, such as those that share one "
           "replica", 1),
    number("--weight", "W", 1e-3, "priority", 1.0, most=1e3),
    text("--tenant", "NAME", "tenant that the job belongs to", "default"),
    text("--kinds", "A,B,...", "kinds of device that the job accepts (default: all)"),
    text("--prefer", "A,B,...", "kinds of device that the job would rather have than others"),
    number("--preference", "X", 1.0, "price of --prefer: another kind has to be so many times as fast, or as "
           "cheap, to be as good", 1.25),
    number("--cpus-per-device", "N", 0.0, "CPUs that the job needs for each device, on its node", 0.0),
    number("--memory-per-device", "GIB", 0.0, "main memory that the job needs for each device, on its node, "
           "in GiB", 0.0),
    text("--level", "LEVEL", "topology level, such as rack; all devices of the job lie within one of its "
         "domains"),
    number("--min-run-s", "S", 0.0, "seconds for which the job keeps the devices it gets", 0.0),
    switch("--not-preemptible", help="once the job has devices, other jobs never get them"),
    number("--budget", "N", 0.0, "maximum cost of the job, by the cluster's prices; without prices it has no "
           "effect (default: no limit)"),
    text("--workdir", "DIR", "workdir of the run, whose journal holds what the job measured (default: the "
         "--workdir among its arguments)", type=folder),
    text("--env", "NAME[=VALUE]", "environment variable of each process, by default with the value that it "
         "has here; may be repeated", [], type=variable, action="append"),
    switch("--what-if", help="print what would happen, and submit nothing"),
    *_CONNECTION,
)  # fmt: skip

_STATUS = (
    argument("job", "JOB", "print everything about this job as JSON", nargs="?"),
    switch("--once", help="print once and stop, as is done if the output is not a terminal"),
)
_JOB = argument("job", "JOB", "id of the job")
_DECIDE = (
    argument("file", "FILE", "file with the request, instead of the standard input", nargs="?", type=file),
)  # fmt: skip
_FOLLOW = switch("-f", "--follow", help="continue until the job is over")
_DRAIN = (
    argument("node", "NODE", "name of the node"),
    OneOf((
        switch("--down", help="take the node's devices away from running jobs, too"),
        switch("--undo", help="put the node back into service"),
    )),
)  # fmt: skip


def add_commands(commands: Commands) -> None:
    """Register the commands of the cluster service, such as `serve` and `submit`."""

    def add(action: Action, usage: str, options: tuple[Option | OneOf, ...], **settings: bool):
        name = action.__name__.removeprefix("_")
        commands.add(40, name, action, f"jaxgoodput {name} {usage}", options, **settings)

    to_service = "[--scheduler URL --token-file F]"
    nodes_usage = "--scheduler URL --engine local|slurm|ray [--count N] --devices D [options]"
    add(_serve, "[--local NODESxDEVICES] [options]", _SERVE)
    add(_node, "--scheduler URL --devices N [options]", (*_NODE, *_DEVICES))
    add(_nodes, nodes_usage, (*_NODES, *_DEVICES))
    add(_manifests, "--image IMAGE [--out DIR] [--jobs nodes|pods] [options]", _MANIFESTS)
    submit_usage = "[--min A --max B] [options] -- python train.py [args ...]"
    add(_submit, submit_usage, _SUBMIT, takes_command=True)
    add(_status, f"{to_service} [JOB]", (*_STATUS, *_CONNECTION))
    add(_logs, f"{to_service} [-f] JOB", (_JOB, _FOLLOW, *_CONNECTION))
    add(_cancel, f"{to_service} JOB", (_JOB, *_CONNECTION))
    add(_explain, f"{to_service} JOB", (_JOB, *_CONNECTION))
    add(_drain, f"{to_service} NODE", (*_DRAIN, *_CONNECTION))
    add(_decide, "[FILE] > plan.json", _DECIDE)


# The actions. Their docstrings are the help texts; the work is done in `terminal`, which is imported late.


def _serve(options, command: list[str], parser: argparse.ArgumentParser) -> int:
    """Share devices among jobs: start the scheduler, its page, and agents on this machine.

    Users submit jobs over HTTP. The jobs get devices, and grow and shrink by goodput. By default the cluster
    has one node, this machine, with a device per processor; other nodes join with `jaxgoodput node`.

    Ctrl-C stops the service and its nodes, whose jobs save. SIGTERM stops only the service: jobs continue
    with their devices until a service with the same --folder is started again.

    examples:
      jaxgoodput serve --local 1x8
      jaxgoodput serve --host 0.0.0.0 --tls-certificate c.pem --tls-key k.pem --local 0
    """
    from jaxgoodput.cluster.service import terminal

    return terminal.serve(options, parser)


def _node(options, command: list[str], parser: argparse.ArgumentParser) -> int:
    """Add this machine's devices to a cluster.

    The agent of a node starts, resizes and stops the processes of jobs as the scheduler tells it. SIGTERM
    removes the node: its jobs save and continue elsewhere.
    """
    from jaxgoodput.cluster.service import terminal

    return terminal.node(options, parser)


def _nodes(options, command: list[str], parser: argparse.ArgumentParser) -> int:
    """Add several nodes to a cluster, with agents that an engine starts.

    One agent is kept running on each node. `local` simulates N nodes on this machine, `slurm` uses all nodes
    of the allocation that it is started in, `ray` all nodes of the running cluster (at RAY_ADDRESS),
    including nodes that join later. Agents that crash are restarted.
    """
    from jaxgoodput.cluster.service import terminal

    return terminal.nodes(options, parser)


def _manifests(options, command: list[str], parser: argparse.ArgumentParser) -> int:
    """Write Kubernetes manifests for a cluster.

    The folder then holds one part for each role, new secrets, and a kustomization, so that one command
    installs the cluster and one removes it. Both are printed.

    examples:
      jaxgoodput manifests --image me/mine --nodes 4 --devices 8 --volume runs
      kubectl apply -k jaxgoodput-kubernetes
    """
    from jaxgoodput.cluster.service import terminal

    return terminal.manifests(options)


def _submit(options, command: list[str], parser: argparse.ArgumentParser) -> int:
    """Submit a job.

    The job gets between A and B devices; the number changes over time. It is started in the current folder.
    The scheduler learns what the job measures from the --workdir among its arguments.
    """
    from jaxgoodput.cluster.service import terminal

    return terminal.submit(options, command, parser)


def _status(options, command: list[str], parser: argparse.ArgumentParser) -> int:
    """Show the cluster and its jobs.

    The tables say which jobs have which devices, and which jobs wait. On a terminal they are refreshed, and
    show the newest 200 jobs.
    """
    from jaxgoodput.cluster.service import terminal

    return terminal.status(options, parser)


def _logs(options, command: list[str], parser: argparse.ArgumentParser) -> int:
    """Print what the processes of a job have written to their output."""
    from jaxgoodput.cluster.service import terminal

    return terminal.logs(options, parser)


def _cancel(options, command: list[str], parser: argparse.ArgumentParser) -> int:
    """Ask the service to cancel a job, which then saves its state and ends."""
    from jaxgoodput.cluster.service import terminal

    return terminal.cancel(options, parser)


def _explain(options, command: list[str], parser: argparse.ArgumentParser) -> int:
    """Explain why a job has its devices, or none, and which changes would give it others.

    Each suggested change was tried by asking the policy again.
    """
    from jaxgoodput.cluster.service import terminal

    return terminal.explain(options, parser)


def _drain(options, command: list[str], parser: argparse.ArgumentParser) -> int:
    """Give a node no new work.

    Jobs that run on the node stay there, unless --down is given. --undo also takes a node back that jobs
    reported as slow or broken.
    """
    from jaxgoodput.cluster.service import terminal

    return terminal.drain(options, parser)


def _decide(options, command: list[str], parser: argparse.ArgumentParser) -> int:
    """Print the plan for a cluster that another program runs: JSON in, JSON out.

    Slurm, Kubernetes, Ray or a scheduler of your own describes its nodes and jobs, and gets who should have
    which devices, and why. No service has to run. docs/howto/decide.md describes the fields.

    examples:
      jaxgoodput decide < cluster_and_jobs.json > plan.json
    """
    from jaxgoodput.cluster.service.decisions import command as decisions

    return decisions.decide_command(options)
