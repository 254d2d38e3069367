"""What the commands about clusters do: they speak to the service, and print."""

import argparse
import contextlib
import os
import pathlib
import secrets
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

from absl import logging
from rich.console import Console
from rich.live import Live
from rich.table import Table

from jaxgoodput._disk import InUse, held
from jaxgoodput._serial import decode, encode, parse
from jaxgoodput.clock import SystemClock
from jaxgoodput.cluster.client import Client, RequestRefused, Unreachable, read_token
from jaxgoodput.cluster.service.wire import (
    DONE,
    FAILED,
    USAGE,
    ClusterShown,
    JobExplanation,
    JobList,
    JobShown,
    Log,
    Receipt,
    Sharing,
    Submission,
    WhatIf,
)
from jaxgoodput.specs import JobSpec, Node
from jaxgoodput.text import compact, seconds

NOTHING = "no devices"  # what `WhatIf.gets` says of a job that would get none
REFRESH_S = 1.0
WAIT_S = 20.0


def serve(options, parser: argparse.ArgumentParser) -> int:
    """`jaxgoodput serve`."""
    from jaxgoodput.cluster.service.record.journal import CorruptJournalError, DiskFull, repair

    folder = _folder(options)
    if options.repair:
        try:
            done = repair(folder)
        except (OSError, ValueError, InUse) as error:
            return _wrong(error)
        if done.aside is None:
            print(f"all {done.kept} events of the journal can be read: nothing was changed")
        else:
            print(
                f"{done.kept} events before place {done.place} are kept; the journal as it was: {done.aside}"
            )
        return DONE
    try:
        from jaxgoodput.cluster.service.serve import run_service
    except ImportError as error:
        return _wrong(
            ValueError(f"{error}. The service needs more: pip install 'jaxgoodput[service]'.")
        )
    if options.policy != "goodput":
        from jaxgoodput.cluster.catalogue import catalogue  # takes a second

        names = list(catalogue())
        if options.policy not in names:
            parser.error(f"--policy: there is no {options.policy!r}. There are: {', '.join(names)}")
    try:
        return run_service(_service(options, folder))
    except (OSError, ValueError, InUse, CorruptJournalError, DiskFull) as error:
        return _wrong(error)


def _service(options, folder: pathlib.Path):
    from jaxgoodput.cluster.service.planning.planners import PolicyOptions
    from jaxgoodput.cluster.service.serve import Service
    from jaxgoodput.cluster.service.web.guard import Bounds
    from jaxgoodput.cluster.service.web.page import Links

    sharing = "{}"
    if options.sharing is not None:
        sharing = options.sharing.read_text()
        try:
            decode(parse(sharing), Sharing, "sharing")
        except ValueError as error:
            raise ValueError(f"--sharing {options.sharing}: {error}") from None
    if not options.min_gap_s <= options.max_gap_s:
        raise ValueError(
            f"--min-gap-s {options.min_gap_s:g} is more than --max-gap-s {options.max_gap_s:g}."
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
        policy=PolicyOptions(
            name=options.policy,
            sharing=sharing,
            min_gap_s=options.min_gap_s,
            max_gap_s=options.max_gap_s,
            restart_s=options.restart_s,
        ),
        bounds=Bounds(per_second=options.rate, wrong_per_minute=options.wrong_rate),
        links=Links(tensorboard=options.tensorboard),
        local=_local(options, folder),
    )


def _local(options, folder: pathlib.Path) -> tuple[str, ...]:
    """The command of the agents of this machine."""
    text = options.local or f"1x{os.cpu_count() or 1}"
    if text == "0":
        return ()
    count, cross, devices = text.partition("x")
    if not (cross and count.isdigit() and devices.isdigit() and int(count) and int(devices)):
        raise ValueError(f"--local {text}: give NODESxDEVICES, such as 1x8, or 0 for none.")
    if options.tokens is not None:
        raise ValueError(
            "--local with --tokens: nobody knows which token is the nodes'. Give --local 0, and start "
            "`jaxgoodput nodes --token-file ...` beside the service."
        )
    return (
        *(sys.executable, "-m", "jaxgoodput.cli", "nodes", "--engine", "local"),
        *("--count", count, "--devices", devices, "--kind", options.kind),
        *("--grace-s", f"{options.grace_s:g}", "--hints-s", f"{options.hints_s:g}"),
        *("--join-s", f"{options.join_s:g}", "--folder", str(folder)),
    )


def node(options, parser: argparse.ArgumentParser) -> int:
    """`jaxgoodput node`."""
    from jaxgoodput.cluster.service.node.agent import IN_USE, NodeAgentSettings, run_node
    from jaxgoodput.cluster.service.node.jobs import LaunchSettings

    try:
        url, connect = _connect(options)
        host = options.address
        if host is None:
            own = urlsplit(url).hostname in ("127.0.0.1", "localhost", "::1")
            host = "127.0.0.1" if own else socket.gethostname()
        name = options.name or socket.gethostname().partition(".")[0]
        labels = dict(_pair(text) for text in options.label)
        made = Node(name=name, kind=options.kind, num_devices=options.devices, labels=labels)
        place = LaunchSettings(node=name, host=host, grace_s=options.grace_s, join_s=options.join_s)
        folder = _folder(options) / "nodes" / name
        part = NodeAgentSettings(
            node=made,
            place=place,
            folder=folder,
            hints_s=options.hints_s,
            alone_s=options.alone_s,
        )
        return run_node(part, connect)
    except InUse as error:
        _wrong(error)
        return IN_USE
    except (ValueError, OSError) as error:
        return _wrong(error)


def nodes(options, parser: argparse.ArgumentParser) -> int:
    """`jaxgoodput nodes`."""
    from jaxgoodput.cluster.service.engines import (
        ENGINE,
        Local,
        Ray,
        Slurm,
        run_engine,
        slurm_nodes,
    )

    if options.engine != "local" and options.count is not None:
        parser.error(f"--count is for --engine local; {options.engine} has nodes of its own")
    try:
        url, connect = _connect(options)
        if options.engine == "slurm":
            engine = Slurm(slurm_nodes())
        elif options.engine == "ray":
            engine = Ray(options.kind, options.devices)
        else:
            engine = Local([f"local{i}" for i in range(options.count or 1)])
    except (ValueError, OSError) as error:
        return _wrong(error)
    shared = ["--scheduler", url, "--devices", str(options.devices), "--kind", options.kind]
    shared += ["--folder", str(_folder(options)), "--grace-s", f"{options.grace_s:g}"]
    shared += ["--hints-s", f"{options.hints_s:g}", "--join-s", f"{options.join_s:g}"]
    given = {"--token-file": options.token_file, "--ca": options.ca, "--alone-s": options.alone_s}
    for flag, value in given.items():
        shared += [] if value is None else [flag, str(value)]
    told = threading.Event()
    for kind in (signal.SIGTERM, signal.SIGINT):
        signal.signal(kind, lambda *_: told.set())

    def lost(name: str) -> None:
        """Has the service know at once what it would know when it has heard nothing for a while."""
        try:
            client = connect()
            with contextlib.closing(client):
                client.call("POST", "nodes", name, "down", changes=True, type_=Receipt)
        except (Unreachable, RequestRefused) as error:
            logging.warning("the service could not be told that node %s has gone: %s", name, error)

    folder = _folder(options) / ENGINE
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with held(folder):  # a service that was killed has left its agents, which go on
            return run_engine(engine, shared, told, SystemClock(), lost)
    except (InUse, OSError) as error:
        return _wrong(error)


def manifests(options) -> int:
    """`jaxgoodput manifests`."""
    from jaxgoodput.cluster.service.manifests import ManifestOptions, jobset, to_yaml

    wanted = ManifestOptions(
        name=options.cluster,
        image=options.image,
        num_nodes=options.nodes,
        num_devices=options.devices,
        kind=options.kind,
        resource=options.resource,
        volume=options.volume,
    )
    try:
        print(to_yaml(jobset(wanted)), end="")
    except ValueError as error:
        return _wrong(error)
    return DONE


def submit(options, command: list[str], parser: argparse.ArgumentParser) -> int:
    """`jaxgoodput submit`."""
    if not command:
        parser.error("there is no command to run: `jaxgoodput submit ... -- python train.py`")
    script = next((word for word in command if word.endswith(".py")), command[0])
    name = options.name or f"{pathlib.Path(script).stem[:40]}-{secrets.token_hex(2)}"
    each = options.devices_per_process
    most = options.max or max(64 // each * each, each)
    try:
        spec = JobSpec(
            id=name,
            mode=options.mode,
            min_devices=options.min or each,
            max_devices=most,
            num_devices=most if options.mode == "rigid" else None,
            weight=options.weight,
            tenant=options.tenant,
            min_run_s=options.min_run_s,
            kinds=tuple(options.kinds.split(",")) if options.kinds else None,
            level=options.level,
        )
        handed_in = Submission(
            spec=spec,
            command=tuple(command),
            cwd=str(pathlib.Path.cwd()),
            workdir=options.workdir or workdir_of(command),
            devices_per_process=each,
        )
        _, connect = _connect(options)
    except ValueError as error:
        return _wrong(error)
    with _said():
        if options.what_if:
            found = connect().call("POST", "what-if", body=handed_in, type_=WhatIf)
            print(f"{found.job} would get {found.gets}: {found.why}")
            for other in found.others:
                print(f"{other.job}: {other.before} -> {other.after}")
            return FAILED if found.gets == NOTHING else DONE
        else:
            job = connect().call("POST", "jobs", body=handed_in, changes=True, type_=JobShown)
            print(job.id)
        return DONE
    return FAILED


def workdir_of(command: list[str]) -> str | None:
    """The --workdir among a program's arguments.

    >>> workdir_of(["python", "train.py", "--workdir=/tmp/run"])
    '/tmp/run'
    """
    for place, word in enumerate(command):
        name, equals, value = word.partition("=")
        if name in ("--workdir", "-workdir"):
            following = command[place + 1 : place + 2]
            return value if equals else (following[0] if following else None)
    return None


def status(options, parser: argparse.ArgumentParser) -> int:
    """`jaxgoodput status`."""
    try:
        _, connect = _connect(options)
    except ValueError as error:
        return _wrong(error)
    client = connect()
    console = Console(highlight=False, markup=False)  # reasons are what they are, brackets and all
    with _said():
        if options.job is not None:
            job = client.call("GET", "jobs", options.job, type_=JobShown)
            console.print_json(data=encode(job))
        elif options.once or not console.is_terminal:
            console.print(*_tables(client))
        else:
            _watch(client, console)
        return DONE
    return FAILED


def _watch(client: Client, console: Console) -> None:
    """Show it again and again, until Ctrl-C."""
    clock = SystemClock()
    with contextlib.suppress(KeyboardInterrupt), Live(console=console, screen=True) as live:
        while True:
            shown = Table.grid()
            try:
                for table in _tables(client):
                    shown.add_row(table)
            except Unreachable as error:
                shown.add_row(f"{error}; jobs go on with what they have")
            live.update(shown, refresh=True)
            clock.sleep(REFRESH_S)


def _tables(client: Client) -> tuple[Table, Table]:
    cluster = client.call("GET", "nodes", type_=ClusterShown)
    listed = client.call("GET", "jobs", type_=JobList, most=200)
    return _nodes_table(cluster), _jobs_table(listed)


def _nodes_table(cluster: ClusterShown) -> Table:
    table = Table("node", "kind", "state", "devices", box=None, pad_edge=False)
    for shown in cluster.nodes:
        its = ", ".join(f"{job}: {len(local)}" for job, local in shown.jobs.items())
        used = sum(map(len, shown.jobs.values()))
        said = f"{used} of {shown.node.num_devices}" + (f" ({its})" if its else "")
        why = f" ({shown.why})" if shown.why and shown.node.state != "up" else ""
        table.add_row(shown.node.name, shown.node.kind, shown.node.state + why, said)
    return table


def _jobs_table(listed: JobList) -> Table:
    heads = ("job", "state", "devices", "goodput", "batch", "done", "time", "why")
    table = Table(*heads, box=None, pad_edge=False)
    for job in listed.jobs:
        hints = job.hints
        end_s = listed.now_s if job.finished_s is None else job.finished_s
        done = "-"
        if hints is not None:
            share = hints.progress / hints.total if hints.total else None
            done = compact(hints.progress) if share is None else f"{100 * min(share, 1):.0f} %"
        table.add_row(
            job.id,
            job.phase,
            str(job.num_devices),
            compact(None if hints is None else hints.goodput),
            compact(None if hints is None else hints.global_batch_size),
            done,
            seconds(end_s - job.submitted_s),
            job.reason,
        )
    return table


def logs(options, parser: argparse.ArgumentParser) -> int:
    """`jaxgoodput logs`."""
    try:
        _, connect = _connect(options)
    except ValueError as error:
        return _wrong(error)
    client, offset = connect(), 0
    with _said():
        while True:
            wait_s = WAIT_S if options.follow else 0.0
            found = client.call(
                "GET", "jobs", options.job, "log", type_=Log, offset=offset, wait_s=wait_s
            )
            print(found.text, end="", flush=True)
            offset = found.next_offset
            if found.over or not (options.follow or found.text):
                return DONE
    return FAILED


def cancel(options, parser: argparse.ArgumentParser) -> int:
    """`jaxgoodput cancel`."""
    return _ask(
        options,
        lambda client: _note(
            client.call("POST", "jobs", options.job, "cancel", type_=Receipt, changes=True)
        ),
    )


def explain(options, parser: argparse.ArgumentParser) -> int:
    """`jaxgoodput explain`."""

    def said(client: Client) -> str:
        found = client.call(
            "GET", "jobs", options.job, "explain", type_=JobExplanation, wait_s=60.0
        )
        lines = [f"{found.job}: {found.message}"]
        return "\n".join([*lines, *(f"it would run with: {change}" for change in found.changes)])

    return _ask(options, said)


def drain(options, parser: argparse.ArgumentParser) -> int:
    """`jaxgoodput drain`."""
    verb = "down" if options.down else "up" if options.undo else "drain"

    def said(client: Client) -> str:
        return _note(client.call("POST", "nodes", options.node, verb, changes=True, type_=Receipt))

    return _ask(options, said)


def _ask(options, question: Callable[[Client], str]) -> int:
    try:
        _, connect = _connect(options)
    except ValueError as error:
        return _wrong(error)
    with _said():
        answer = question(connect())
        if answer:
            print(answer)
        return DONE
    return FAILED


def _note(taken: Receipt) -> str:
    return taken.note


@contextlib.contextmanager
def _said() -> Iterator[None]:
    """What the service refuses, or that it does not answer, on the standard error output."""
    try:
        yield
    except (RequestRefused, Unreachable) as error:
        print(f"jaxgoodput: {error}", file=sys.stderr)


def _folder(options) -> pathlib.Path:
    default = pathlib.Path.home() / ".jaxgoodput" / "service"
    return default if options.folder is None else options.folder


def _connect(options) -> tuple[str, Callable[[], Client]]:
    """The service's address, and what makes connections to it. Raises ValueError."""
    folder = _folder(options)
    url = options.scheduler
    if url is None:
        try:
            url = (folder / "address").read_text().strip()
        except OSError:
            raise ValueError(
                f"no service was started with the folder {folder}. Give --scheduler URL and --token-file, or "
                "start one here: `jaxgoodput serve`."
            ) from None
    token = read_token(options.token_file or folder / "token")
    ca: Any = options.ca
    Client(url, token, ca=ca)  # what is wrong with these is said now
    return url, lambda: Client(url, token, ca=ca)


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise ValueError(f"--label {text}: give LEVEL=DOMAIN, such as rack=r3.")
    return name, value


def _wrong(error: Exception) -> int:
    print(f"jaxgoodput: {error}", file=sys.stderr)
    return USAGE
