"""Carries out the commands about clusters: it calls the service and prints the answers."""

import argparse
import contextlib
import os
import pathlib
import re
import secrets
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterable
from urllib.parse import urlsplit

from absl import logging
from rich.console import Console
from rich.live import Live
from rich.table import Table

from jaxgoodput._disk import InUse, held
from jaxgoodput._exits import DONE, FAILED, USAGE
from jaxgoodput._fields.serial import decode, encode, parse
from jaxgoodput.clock import SystemClock
from jaxgoodput.cluster.client import Client, RequestRefused, Unreachable, read_token
from jaxgoodput.cluster.service import wire
from jaxgoodput.cluster.service.web.show import (
    left_in_words,
    progress,
    state_in_words,
    with_faults,
)
from jaxgoodput.cluster.service.wire import Receipt
from jaxgoodput.launcher.variables import as_mapping
from jaxgoodput.specs import JobSpec, Node
from jaxgoodput.text import compact, count, seconds

NOTHING = "no devices"  # what `WhatIf.gets` says if a job would get none
REFRESH_S = 1.0
MOST_WATCHED = 200  # newest jobs that are shown while the tables are refreshed
MOST_OF_PAGE = 200  # jobs of one answer, if all are asked for
WAIT_S = 20.0


def serve(options, parser: argparse.ArgumentParser) -> int:
    """Carry out the command `jaxgoodput serve`; return its exit code."""
    from jaxgoodput.cluster.service.record.table import CorruptJournalError, DiskFull

    folder = _folder(options)
    if options.repair:
        return _repair(folder)
    try:
        from jaxgoodput.cluster.service.serve import run_service
    except ImportError as error:
        return _wrong(
            ValueError(
                f"{error}. The service needs more packages: pip install 'jaxgoodput[service]'."
            )
        )
    if options.policy != "goodput":
        from jaxgoodput.cluster.catalogue import catalogue  # takes a second

        names = list(catalogue())
        if options.policy not in names:
            parser.error(
                f"--policy: there is no {options.policy!r}. The policies are: {', '.join(names)}"
            )
    try:
        return run_service(_service(options, folder))
    except (OSError, ValueError, InUse, CorruptJournalError, DiskFull) as error:
        return _wrong(error)


def _repair(folder: pathlib.Path) -> int:
    from jaxgoodput.cluster.service.record.repair import repair
    from jaxgoodput.cluster.service.record.table import DiskFull

    try:
        done = repair(folder)
    except (OSError, ValueError, InUse, DiskFull) as error:
        return _wrong(error)
    print(done.text())
    return DONE


def _service(options, folder: pathlib.Path):
    from jaxgoodput.cluster.service.serve import Service
    from jaxgoodput.cluster.service.web.guard import Bounds
    from jaxgoodput.cluster.service.web.page import Links

    sharing = wire.Sharing()
    if options.sharing is not None:
        try:
            sharing = decode(parse(options.sharing.read_text()), wire.Sharing, "sharing")
        except (OSError, ValueError) as error:
            raise ValueError(f"--sharing {options.sharing}: {error}") from None
    if not options.min_gap_s <= options.max_gap_s:
        raise ValueError(
            f"--min-gap-s {options.min_gap_s:g} is more than --max-gap-s {options.max_gap_s:g}. Raise the "
            "second or lower the first."
        )
    return Service(
        folder=folder,
        host=options.host,
        port=options.port,
        tokens=options.tokens,
        certificate=options.tls_certificate,
        key=options.tls_key,
        silent_s=options.silent_s,
        longest_wait_s=options.longest_wait_s,
        apart_s=options.apart_s,
        plans=wire.PlanOptions(
            policy=options.policy,
            sharing=sharing,
            min_gap_s=options.min_gap_s,
            max_gap_s=options.max_gap_s,
            restart_s=options.restart_s,
        ),
        bounds=Bounds(
            per_second=options.rate,
            wrong_per_minute=options.wrong_rate,
            questions_per_minute=options.questions,
        ),
        links=Links(tensorboard=options.tensorboard),
        local=_local(options, folder),
    )


def _local(options, folder: pathlib.Path) -> tuple[str, ...]:
    """Return the command line that runs the agents of this machine; empty for `--local 0`."""
    text = options.local or f"1x{os.cpu_count() or 1}"
    if text == "0":
        return ()
    if not (found := re.fullmatch("([1-9][0-9]{0,5})x([1-9][0-9]{0,5})", text)):
        raise ValueError(f"--local {text}: give NODESxDEVICES, such as 1x8, or 0 for none.")
    count, devices = found.groups()
    if options.tokens is not None:
        raise ValueError(
            "--local with --tokens: it is not clear which token the nodes should use. Give --local 0, and "
            "start `jaxgoodput nodes --token-file ...` beside the service."
        )
    return (
        *(sys.executable, "-m", "jaxgoodput.cli", "nodes", "--engine", "local"),
        *("--count", count, "--devices", devices, "--folder", str(folder)),
        *_agent_options(options),
    )


def _agent_options(options) -> list[str]:
    """Return the options that `serve` and `nodes` pass on to the agents that they start."""
    return [
        *("--kind", options.kind, "--grace-s", f"{options.grace_s:g}"),
        *("--hints-s", f"{options.hints_s:g}", "--join-s", f"{options.join_s:g}"),
    ]


def node(options, parser: argparse.ArgumentParser) -> int:
    """Carry out the command `jaxgoodput node`; return its exit code."""
    from jaxgoodput.cluster.service.node.agent import IN_USE, NodeAgentSettings, run_node
    from jaxgoodput.cluster.service.node.jobs import LaunchSettings

    try:
        url, connect = _connect(options)
        host = options.address
        if host is None:
            is_here = urlsplit(url).hostname in ("127.0.0.1", "localhost", "::1")
            host = "127.0.0.1" if is_here else socket.gethostname()
        name = options.name or socket.gethostname().partition(".")[0]
        wire.check_name(name, "a node")
        labels = dict(_label(text) for text in options.label)
        part = NodeAgentSettings(
            node=Node(
                name=name,
                kind=options.kind,
                num_devices=options.devices,
                labels=labels,
                cpus=options.cpus,
                memory_gib=options.memory,
            ),
            place=LaunchSettings(
                node=name, host=host, grace_s=options.grace_s, join_s=options.join_s
            ),
            folder=_folder(options) / "nodes" / name,
            hints_s=options.hints_s,
            alone_s=options.alone_s,
        )
        if options.pods is None:
            return run_node(part, connect)
        return run_node(part, connect, jobs=_jobs_as_pods(options))
    except InUse as error:
        _wrong(error)
        return IN_USE
    except (ValueError, OSError) as error:
        return _wrong(error)


def _jobs_as_pods(options):
    """Return what runs jobs as pods. Raises ValueError or OSError if it is not available."""
    from jaxgoodput.cluster.service.kubernetes.api import ApiAccess
    from jaxgoodput.cluster.service.kubernetes.pod_jobs import PodSettings, jobs_as_pods

    return jobs_as_pods(
        PodSettings(
            template=options.pods,
            resource=options.resource,
            elastic_jobset=options.elastic_jobset,
            owner=options.owner,
            access=ApiAccess(url=options.api, credentials=options.api_credentials),
        )
    )


def nodes(options, parser: argparse.ArgumentParser) -> int:
    """Carry out the command `jaxgoodput nodes`; return its exit code."""
    from jaxgoodput.cluster.service.engines import ENGINE, run_engine

    if options.engine != "local" and options.count is not None:
        parser.error(
            f"--count is for --engine local; {options.engine} has nodes of its own, so leave it out"
        )
    try:
        url, connect = _connect(options)
        engine = _engine(options)
    except (ValueError, OSError) as error:
        return _wrong(error)
    shared = ["--scheduler", url, "--devices", str(options.devices)]
    shared += ["--folder", str(_folder(options)), *_agent_options(options)]
    given = {
        "--token-file": options.token_file,
        "--ca": options.ca,
        "--alone-s": options.alone_s,
        "--cpus": options.cpus,
        "--memory": options.memory,
    }
    for flag, value in given.items():
        shared += [] if value is None else [flag, str(value)]
    told = threading.Event()
    for kind in (signal.SIGTERM, signal.SIGINT):
        signal.signal(kind, lambda *_: told.set())

    def lost(name: str) -> None:
        """Tell the service at once that a node is lost, before it misses heartbeats."""
        try:
            with contextlib.closing(connect()) as client:
                client.call("POST", "nodes", name, "down", changes=True, type_=Receipt)
        except (Unreachable, RequestRefused) as error:
            logging.warning(
                "the service could not be told that node %s is lost (%s). It marks the node as down once it "
                "misses the heartbeats.",
                name,
                error,
            )

    folder = _folder(options) / ENGINE
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with held(folder):  # the engine of a service that was killed may still run
            return run_engine(engine, shared, told, SystemClock(), lost)
    except (InUse, OSError) as error:
        return _wrong(error)


def _engine(options):
    """Return the engine that starts agents. Raises ValueError or OSError if it is not available."""
    from jaxgoodput.cluster.service.engines import Local, Ray, Slurm, slurm_nodes

    if options.engine == "slurm":
        return Slurm(slurm_nodes())
    if options.engine == "ray":
        return Ray(options.kind, options.devices)
    return Local([f"local{i}" for i in range(options.count or 1)])


def manifests(options) -> int:
    """Carry out the command `jaxgoodput manifests`; return its exit code."""
    from jaxgoodput.cluster.service.kubernetes import folder
    from jaxgoodput.cluster.service.kubernetes.manifests import ManifestOptions
    from jaxgoodput.cluster.service.kubernetes.pods import PodPlace

    resource = options.resource
    if resource is None:
        resource = "" if options.kind == "cpu" else "nvidia.com/gpu"
    own = {"key": resource, "operator": "Exists"}  # the usual taint of machines with such devices
    tolerations = options.toleration or ([own] if resource else [])
    try:
        wanted = ManifestOptions(
            name=options.cluster,
            namespace=options.namespace,
            image=options.image,
            jobs=options.jobs,
            num_nodes=options.nodes,
            num_devices=options.devices,
            kind=options.kind,
            resource=resource,
            cpu=options.cpu,
            memory=options.memory,
            shared_memory=options.shm,
            place=PodPlace(
                node_selector=dict(options.node_selector), tolerations=tuple(tolerations)
            ),
            queue=options.queue,
            elastic_jobset=options.elastic_jobset,
            volume=options.volume,
            user_id=options.user,
            grace_s=options.grace_s,
        )
        folder.write(options.out, wanted)
    except (ValueError, OSError) as error:
        return _wrong(error)
    print(folder.commands(options.out, wanted), end="")
    return DONE


def submit(options, command: list[str], parser: argparse.ArgumentParser) -> int:
    """Carry out the command `jaxgoodput submit`; return its exit code."""
    if not command:
        parser.error("there is no command to run: `jaxgoodput submit ... -- python train.py`")
    try:
        submission = _submission(options, command)
    except ValueError as error:
        return _wrong(error)

    def send(client: Client) -> int:
        job = client.call("POST", "jobs", body=submission, changes=True, type_=wire.JobShown)
        print(job.id)
        return DONE

    def ask(client: Client) -> int:
        found = client.call("POST", "what-if", body=submission, type_=wire.WhatIf)
        print(f"{found.job} would get {found.gets}: {found.why}")
        for other in found.others:
            print(f"{other.job}: {other.before} -> {other.after}")
        return FAILED if found.gets == NOTHING else DONE

    return _ask(options, ask if options.what_if else send)


def _submission(options, command: list[str]) -> wire.Submission:
    """Return the job that the options describe. Raises ValueError."""
    script = next((word for word in command if word.endswith(".py")), command[0])
    each = options.devices_per_process
    most = options.max or max(64 // each * each, each)
    if (options.min or each) > most:
        raise ValueError(
            f"--min {options.min or each} is above --max {most}. Raise --max, or lower --min or "
            "--devices-per-process."
        )
    return wire.Submission(
        spec=JobSpec(
            id=options.name or f"{pathlib.Path(script).stem[:40]}-{secrets.token_hex(2)}",
            mode=options.mode,
            min_devices=options.min or each,
            max_devices=most,
            num_devices=most if options.mode == "rigid" else None,
            weight=options.weight,
            tenant=options.tenant,
            min_run_s=options.min_run_s,
            preemptible=not options.not_preemptible,
            budget=options.budget,
            kinds=tuple(options.kinds.split(",")) if options.kinds else None,
            preferred_kinds=tuple(options.prefer.split(",")) if options.prefer else None,
            preference=options.preference,
            cpus_per_device=options.cpus_per_device,
            memory_gib_per_device=options.memory_per_device,
            level=options.level,
        ),
        command=tuple(command),
        variables=tuple(as_mapping(options.env).items()),
        cwd=str(pathlib.Path.cwd()),
        workdir=str(options.workdir or "") or workdir_of(command),
        devices_per_process=each,
    )


def workdir_of(command: list[str]) -> str | None:
    """Return the value of --workdir among a program's arguments.

    >>> workdir_of(["python", "train.py", "--workdir=/tmp/run"])
    '/tmp/run'
    """
    for index, word in enumerate(command):
        name, equals, value = word.partition("=")
        if name in ("--workdir", "-workdir"):
            following = command[index + 1 : index + 2]
            return value if equals else (following[0] if following else None)
    return None


def status(options, parser: argparse.ArgumentParser) -> int:
    """Carry out the command `jaxgoodput status`; return its exit code."""

    def show(client: Client) -> int:
        # Reasons may hold brackets, which Rich would read as markup.
        console = Console(highlight=False, markup=False)
        if options.job is not None:
            job = client.call("GET", "jobs", options.job, type_=wire.JobShown)
            console.print_json(data=encode(job))
        elif options.once or not console.is_terminal:
            cluster = client.call("GET", "nodes", type_=wire.ClusterShown)
            pages = [*client.pages("jobs", type_=wire.JobList, most=MOST_OF_PAGE)]
            jobs = [job for page in reversed(pages) for job in page.jobs]
            console.print(_nodes_table(cluster), _jobs_table(jobs, pages[0].now_s))
        else:
            _watch(client, console)
        return DONE

    return _ask(options, show)


def _watch(client: Client, console: Console) -> None:
    """Refresh the tables until Ctrl-C."""
    clock = SystemClock()
    with contextlib.suppress(KeyboardInterrupt), Live(console=console, screen=True) as live:
        while True:
            shown = Table.grid()
            try:
                shown.add_row(_nodes_table(client.call("GET", "nodes", type_=wire.ClusterShown)))
                listed = client.call("GET", "jobs", type_=wire.JobList, most=MOST_WATCHED)
                if listed.num_older:
                    older = count(listed.num_older, "older job")
                    shown.add_row(f"({older} not shown; `jaxgoodput status --once` lists all jobs)")
                shown.add_row(_jobs_table(listed.jobs, listed.now_s))
            except Unreachable as error:
                shown.add_row(f"{error}; jobs keep their devices")
            live.update(shown, refresh=True)
            clock.sleep(REFRESH_S)


def _nodes_table(cluster: wire.ClusterShown) -> Table:
    table = Table("node", "kind", "state", "devices", box=None, pad_edge=False)
    for shown in cluster.nodes:
        node = shown.node
        held = ", ".join(f"{job}: {len(local)}" for job, local in shown.jobs.items())
        used = sum(map(len, shown.jobs.values()))
        said = f"{used} of {node.num_devices}" + (f" ({held})" if held else "")
        said = "; ".join((said, *left_in_words(shown.cpus_left, shown.memory_gib_left)))
        state = with_faults(state_in_words(node.state, shown.why), shown.faults, cluster.now_s)
        table.add_row(node.name, node.kind, state, said)
    return table


def _jobs_table(jobs: Iterable[wire.JobShown], now_s: float) -> Table:
    heads = ("job", "state", "devices", "goodput", "batch", "done", "time", "why")
    table = Table(*heads, box=None, pad_edge=False)
    for job in jobs:
        hints = job.hints
        end_s = now_s if job.finished_s is None else job.finished_s
        table.add_row(
            job.id,
            job.phase,
            str(job.num_devices),
            compact(None if hints is None else hints.goodput),
            compact(None if hints is None else hints.global_batch_size),
            progress(hints),
            seconds(end_s - job.submitted_s),
            job.reason,
        )
    return table


def logs(options, parser: argparse.ArgumentParser) -> int:
    """Carry out the command `jaxgoodput logs`; return its exit code."""
    wait_s = WAIT_S if options.follow else 0.0

    def show(client: Client) -> int:
        offset = 0
        while True:
            found = client.call(
                "GET", "jobs", options.job, "log", type_=wire.Log, offset=offset, wait_s=wait_s
            )
            print(found.text, end="", flush=True)
            offset = found.next_offset
            if found.over or not (options.follow or found.text):
                return DONE

    return _ask(options, show)


def cancel(options, parser: argparse.ArgumentParser) -> int:
    """Carry out the command `jaxgoodput cancel`; return its exit code."""
    return _ask(options, lambda client: _change(client, "jobs", options.job, "cancel"))


def drain(options, parser: argparse.ArgumentParser) -> int:
    """Carry out the command `jaxgoodput drain`; return its exit code."""
    verb = "down" if options.down else "up" if options.undo else "drain"
    return _ask(options, lambda client: _change(client, "nodes", options.node, verb))


def explain(options, parser: argparse.ArgumentParser) -> int:
    """Carry out the command `jaxgoodput explain`; return its exit code."""

    def show(client: Client) -> int:
        found = client.call(
            "GET", "jobs", options.job, "explain", type_=wire.JobExplanation, wait_s=60.0
        )
        print(f"{found.job}: {found.message}")
        for change in found.changes:
            print(f"it would run with: {change}")
        return DONE

    return _ask(options, show)


def _change(client: Client, *path: str) -> int:
    receipt = client.call("POST", *path, changes=True, type_=Receipt)
    if receipt.note:
        print(receipt.note)
    return DONE


def _ask(options, question: Callable[[Client], int]) -> int:
    """Call the service; return the exit code, and print why if the service refuses or does not answer."""
    try:
        _, connect = _connect(options)
    except ValueError as error:
        return _wrong(error)
    try:
        return question(connect())
    except (RequestRefused, Unreachable) as error:
        print(f"jaxgoodput: {error}", file=sys.stderr)
        return FAILED


def _folder(options) -> pathlib.Path:
    default = pathlib.Path.home() / ".jaxgoodput" / "service"
    return default if options.folder is None else options.folder


def _connect(options) -> tuple[str, Callable[[], Client]]:
    """Return the service's URL, and a function that makes a client for it. Raises ValueError."""
    folder, ca = _folder(options), options.ca
    url = options.scheduler
    if url is None:
        try:
            url = (folder / "address").read_text().strip()
        except OSError:
            raise ValueError(
                f"no service was started with --folder {folder}. Give --scheduler URL and --token-file, or "
                "start a service here: `jaxgoodput serve`."
            ) from None
    try:
        token = read_token(options.token_file or folder / "token")
    except ValueError as error:
        raise ValueError(f"--token-file: {error}") from None
    Client(url, token, ca=ca)  # raises now if the URL is wrong
    return url, lambda: Client(url, token, ca=ca)


def _label(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise ValueError(f"--label {text}: give LEVEL=DOMAIN, such as rack=r3.")
    return name, value


def _wrong(error: Exception) -> int:
    print(f"jaxgoodput: {error}", file=sys.stderr)
    return USAGE
