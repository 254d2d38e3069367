"""What can be typed about clusters: `serve`, `node`, `submit`, `status` and so on, and their options.

What they do is in `terminal.py`, which is loaded when one is called.
"""

import argparse
import pathlib
from collections.abc import Callable
from typing import Any

Add = Callable[..., argparse.ArgumentParser]
AtLeast = Callable[[Any], Callable[[str], Any]]


def add_commands(add: Add, at_least: AtLeast) -> None:
    """Add them all. `at_least(N)` is a type of argparse: numbers from N on."""
    _serve_options(
        add(
            "serve",
            _serve,
            "share devices among jobs: the scheduler, its page, and agents of this machine",
            "jaxgoodput serve [--local NODESxDEVICES] [options]",
            "Serve a cluster over HTTP: jobs are handed in, get devices, grow and shrink by goodput. By\n"
            "itself it has one node, this machine, with a device for each processor; others join with\n"
            "`jaxgoodput node`. Ctrl-C ends it and its nodes, which save; SIGTERM ends the service alone,\n"
            "and jobs go on with what they have until one with the same --folder is there again.\n\n"
            "examples: jaxgoodput serve --local 1x8\n"
            "          jaxgoodput serve --host 0.0.0.0 --tls-certificate c.pem --tls-key k.pem --local 0",
        ),
        at_least,
    )
    node = add(
        "node",
        _node,
        "have this machine's devices take part in a cluster",
        "jaxgoodput node --scheduler URL --devices N [options]",
        "Run the agent of a node: it starts, resizes and stops the processes of jobs as the scheduler\n"
        "says. SIGTERM gives the node up: what runs saves and goes on elsewhere.",
    )
    node.add_argument("--name", help="of this node (default: its host name)")
    node.add_argument("--address", metavar="HOST", help="by which other nodes reach this one "
                      "(default: 127.0.0.1 where the scheduler is there, else the host name)")  # fmt: skip
    node.add_argument("--label", action="append", default=[], metavar="LEVEL=DOMAIN",
                      help="such as rack=r3; coordinates= has coordinators of jobs run here")  # fmt: skip
    nodes = add(
        "nodes",
        _nodes,
        "have several nodes take part, each with an agent that an engine starts",
        "jaxgoodput nodes --scheduler URL --engine local|slurm|ray [--count N] --devices D [options]",
        "Keep an agent on each of several nodes: `local` has N nodes that are this machine, `slurm` all\n"
        "of the allocation that it is started in, `ray` all of the running cluster (at RAY_ADDRESS), those\n"
        "too that join it later. Agents that crash are started again.",
    )
    nodes.add_argument("--engine", choices=("local", "slurm", "ray"), default="local")
    nodes.add_argument("--count", type=at_least(1), metavar="N", help="nodes (local; default: 1)")
    for command in (node, nodes):
        command.add_argument("--devices", type=at_least(0), default=1, metavar="N",
                             help="of a node; on CPU they are virtual (default: 1)")  # fmt: skip
        command.add_argument("--alone-s", type=at_least(30.0), metavar="S",
                             help="after so long without a word of the scheduler jobs save and end here "
                             "(default: they go on)")  # fmt: skip
        _agent_options(command, at_least)
        _where(command)
    manifests = add(
        "manifests",
        _manifests,
        "print what Kubernetes is told to run a cluster",
        "jaxgoodput manifests --image IMAGE [--nodes N] [--devices D] [options]",
        "Print a JobSet: the scheduler, and the agents of N nodes that come and go with it.",
    )
    manifests.add_argument(
        "--image", required=True, help="with jaxgoodput[service] and your programs"
    )
    manifests.add_argument("--cluster", default="jaxgoodput", metavar="NAME")
    manifests.add_argument("--nodes", type=at_least(1), default=2, metavar="N")
    manifests.add_argument("--devices", type=at_least(1), default=8, metavar="D", help="of a node")
    manifests.add_argument("--kind", default="gpu", help="of device")
    manifests.add_argument(
        "--resource", default="nvidia.com/gpu", help="as which they are asked for"
    )
    manifests.add_argument("--volume", metavar="CLAIM", help="for the journal and the workdirs")
    _submit_options(
        add(
            "submit",
            _submit,
            "hand in a job",
            "jaxgoodput submit [--min A --max B] [options] -- python train.py [args ...]",
            "Hand in a job, which gets between A and B devices, others as time goes by. It is started in\n"
            "this folder; hints are read from the --workdir among its arguments.",
        ),
        at_least,
    )
    where = "jaxgoodput {} [--scheduler URL --token-file F] {}"
    status = add("status", _status, "show the cluster and its jobs", where.format("status", "[JOB]"),
                 "Show who has which devices and what waits, again and again on a terminal.")  # fmt: skip
    status.add_argument("job", nargs="?", metavar="JOB", help="all of one job, as JSON")
    status.add_argument("--once", action="store_true", help="once only, as is done in a file")
    logs = add("logs", _logs, "print what the processes of a job write",
               where.format("logs", "[-f] JOB"), "Print the lines of a job's processes.")  # fmt: skip
    logs.add_argument("job", metavar="JOB")
    logs.add_argument("-f", "--follow", action="store_true", help="until the job is over")
    cancel = add("cancel", _cancel, "take a job away", where.format("cancel", "JOB"),
                 "Take a job away: it saves and ends.")  # fmt: skip
    cancel.add_argument("job", metavar="JOB")
    explain = add("explain", _explain, "say why a job has what it has",
                  where.format("explain", "JOB"),
                  "Say why a job waits or has its devices, and what would change that; each change was\n"
                  "tried by asking the policy again.")  # fmt: skip
    explain.add_argument("job", metavar="JOB")
    drain = add("drain", _drain, "give a node nothing new", where.format("drain", "NODE"),
                "What runs on the node stays, and it gets nothing new.")  # fmt: skip
    drain.add_argument("node", metavar="NODE")
    to = drain.add_mutually_exclusive_group()
    to.add_argument("--down", action="store_true", help="jobs lose what they have there, too")
    to.add_argument("--undo", action="store_true", help="it is up again")
    for command in (status, logs, cancel, explain, drain):
        _where(command)


def _where(command: argparse.ArgumentParser) -> None:
    """Where the service is."""
    command.add_argument("--scheduler", metavar="URL", help="of the service (default: the one that was "
                         "started last with the --folder)")  # fmt: skip
    command.add_argument("--token-file", type=pathlib.Path, metavar="F", help="(default: that of the "
                         "--folder)")  # fmt: skip
    command.add_argument("--ca", type=pathlib.Path, metavar="F", help="of the service's certificate, "
                         "where it is not signed by one that this system knows")  # fmt: skip
    _folder(command)


def _folder(command: argparse.ArgumentParser) -> None:
    command.add_argument("--folder", type=pathlib.Path, metavar="DIR", help="of the service "
                         "(default: .jaxgoodput/service in the home folder)")  # fmt: skip


def _agent_options(command: argparse.ArgumentParser, at_least: AtLeast) -> None:
    command.add_argument("--kind", default="cpu", help="of device, such as h200 (default: cpu)")
    command.add_argument("--grace-s", type=at_least(0.0), default=60.0, metavar="S",
                         help="for which a process may save when it is stopped (default: 60)")  # fmt: skip
    command.add_argument("--hints-s", type=at_least(0.1), default=5.0, metavar="S",
                         help="between two looks at what jobs measured (default: 5)")  # fmt: skip
    command.add_argument("--join-s", type=at_least(0.0), default=3.0, metavar="S",
                         help="how long a start waits for more than the least (default: 3)")  # fmt: skip


def _serve_options(serve: argparse.ArgumentParser, at_least: AtLeast) -> None:
    _folder(serve)
    serve.add_argument("--local", metavar="NODESxDEVICES", help="nodes that are this machine; 0: none "
                       "(default: 1 with a device for each processor)")  # fmt: skip
    _agent_options(serve, at_least)
    serve.add_argument("--host", default="127.0.0.1", help="where to listen (default: 127.0.0.1)")
    serve.add_argument(
        "--port", type=at_least(0), default=8765, help="0: a free one (default: 8765)"
    )
    serve.add_argument("--tokens", type=pathlib.Path, metavar="F", help='JSON: {"tokens": [{"token": ..., '
                       '"tenant": ..., "role": "user|node|operator"}, ...]} (default: one, the operator\'s, '
                       "made in the folder)")  # fmt: skip
    serve.add_argument("--tls-certificate", type=pathlib.Path, metavar="F")
    serve.add_argument("--tls-key", type=pathlib.Path, metavar="F")
    serve.add_argument("--policy", default="goodput", help="as in `jaxgoodput simulate --list` "
                       "(default: goodput)")  # fmt: skip
    serve.add_argument("--sharing", type=pathlib.Path, metavar="F", help="JSON of tenants, quota, "
                       "reservations and price_per_hour, as of a ClusterSpec")  # fmt: skip
    serve.add_argument("--min-gap-s", type=at_least(0.0), default=5.0, metavar="S",
                       help="the least time between two plans (default: 5)")  # fmt: skip
    serve.add_argument("--max-gap-s", type=at_least(1.0), default=60.0, metavar="S",
                       help="the most (default: 60)")  # fmt: skip
    serve.add_argument("--restart-s", type=at_least(0.0), default=10.0, metavar="S",
                       help="what a change costs a job that has not shown it yet (default: 10)")  # fmt: skip
    serve.add_argument("--silent-s", type=at_least(1.0), default=30.0, metavar="S",
                       help="a node that says nothing for so long is down (default: 30)")  # fmt: skip
    serve.add_argument("--longest-wait-s", type=at_least(0.1), default=30.0, metavar="S",
                       help="for which an answer waits for something to tell, at most 30; less behind a "
                       "proxy that ends what takes longer (default: 30)")  # fmt: skip
    serve.add_argument("--rate", type=at_least(1.0), default=1000.0, metavar="N",
                       help="requests of one token a second (default: 1000)")  # fmt: skip
    serve.add_argument("--wrong-rate", type=at_least(1.0), default=30.0, metavar="N",
                       help="an address's requests without a right token a minute (default: 30)")  # fmt: skip
    serve.add_argument("--tensorboard", metavar="URL", help="to which the page links")
    serve.add_argument("--repair", action="store_true", help="keep all of a damaged journal that is before "
                       "the damage, say so, and end")  # fmt: skip


def _submit_options(submit: argparse.ArgumentParser, at_least: AtLeast) -> None:
    submit.set_defaults(takes_command=True)
    submit.add_argument("--name", help="(default: that of the script, with a few letters more)")
    submit.add_argument("--min", type=at_least(1), metavar="A", help="devices (default: 1)")
    submit.add_argument("--max", type=at_least(1), metavar="B", help="devices (default: 64)")
    submit.add_argument("--mode", choices=("adaptive", "elastic", "rigid"), default="adaptive",
                        help="adaptive: size and batch change; elastic: the batch stays; rigid: so does the "
                        "size, --max")  # fmt: skip
    submit.add_argument("--devices-per-process", type=at_least(1), default=1, metavar="D",
                        help="such as those that share one replica (default: 1)")  # fmt: skip
    submit.add_argument("--weight", type=at_least(0.0), default=1.0, help="priority (default: 1)")
    submit.add_argument("--tenant", default="default")
    submit.add_argument("--kinds", metavar="A,B,...", help="of device that it may have")
    submit.add_argument("--level", help="a label of nodes within which it stays, such as rack")
    submit.add_argument("--min-run-s", type=at_least(0.0), default=0.0, metavar="S",
                        help="it keeps what it gets for so long")  # fmt: skip
    submit.add_argument("--workdir", metavar="DIR", help="of the run, from whose journal hints are read "
                        "(default: the --workdir among its arguments)")  # fmt: skip
    submit.add_argument("--what-if", action="store_true", help="only say what would happen")
    _where(submit)


# What each command does, loaded when it is called.


def _serve(options, command: list[str], parser: argparse.ArgumentParser) -> int:
    from jaxgoodput.cluster.service import terminal

    return terminal.serve(options, parser)


def _node(options, command: list[str], parser: argparse.ArgumentParser) -> int:
    from jaxgoodput.cluster.service import terminal

    return terminal.node(options, parser)


def _nodes(options, command: list[str], parser: argparse.ArgumentParser) -> int:
    from jaxgoodput.cluster.service import terminal

    return terminal.nodes(options, parser)


def _manifests(options, command: list[str], parser: argparse.ArgumentParser) -> int:
    from jaxgoodput.cluster.service import terminal

    return terminal.manifests(options)


def _submit(options, command: list[str], parser: argparse.ArgumentParser) -> int:
    from jaxgoodput.cluster.service import terminal

    return terminal.submit(options, command, parser)


def _status(options, command: list[str], parser: argparse.ArgumentParser) -> int:
    from jaxgoodput.cluster.service import terminal

    return terminal.status(options, parser)


def _logs(options, command: list[str], parser: argparse.ArgumentParser) -> int:
    from jaxgoodput.cluster.service import terminal

    return terminal.logs(options, parser)


def _cancel(options, command: list[str], parser: argparse.ArgumentParser) -> int:
    from jaxgoodput.cluster.service import terminal

    return terminal.cancel(options, parser)


def _explain(options, command: list[str], parser: argparse.ArgumentParser) -> int:
    from jaxgoodput.cluster.service import terminal

    return terminal.explain(options, parser)


def _drain(options, command: list[str], parser: argparse.ArgumentParser) -> int:
    from jaxgoodput.cluster.service import terminal

    return terminal.drain(options, parser)
