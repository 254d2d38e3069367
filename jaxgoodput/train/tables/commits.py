"""Keeps tables and checkpoints together: which commit of every table belongs to which step.

A checkpoint names the commits that were made just before it, and a resumed run opens its tables at them. If a
process was killed after a commit and before the checkpoint was written, that commit is never read.

Each of several processes commits its own rows. The checkpoint names the commits of process 0; the matching
commits of the others carry the same note (`Said`). If a run resumes with another number of processes than
have saved, process 0 moves each row to its new owner before any table is opened.
"""

import contextlib
import json
import socket
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from jaxgoodput import _wire
from jaxgoodput._disk import DamagedError, InUse
from jaxgoodput._jax import own_host
from jaxgoodput.clock import Clock
from jaxgoodput.embedding.hosts import resize
from jaxgoodput.embedding.peers import Peers, Share
from jaxgoodput.embedding.plan import Table
from jaxgoodput.embedding.store import commits_in, manifests, read_manifest
from jaxgoodput.embedding.table import TieredTable
from jaxgoodput.parallel.place import Place
from jaxgoodput.workdir.places import workdir_of

Tables = Mapping[str, TieredTable]
Said = Mapping[int, Mapping[str, Any]]
"""The note that was written with each commit of a table, by the number of the commit."""
# What process 0 may raise for all processes. An OSError of its disk is a ValueError in the others.
_KINDS = {"damaged": DamagedError, "in use": InUse, "value": ValueError}


def peers_of(where: Place) -> Peers | None:
    """Connect to the other processes that hold the tables, which call this together; None in one process.

    Raises ConnectionError if one of them cannot be reached.
    """
    if where.process_count == 1:
        return None
    host = own_host()
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family, backlog=where.process_count) as listener:
        mine = {"address": f"{host}:{listener.getsockname()[1]}", "secret": _wire.make_secret()}
        told = [json.loads(x) for x in where.told("who holds the tables", json.dumps(mine))]
        return Peers(
            where.process_index, [one["address"] for one in told], told[0]["secret"], listener
        )


@dataclass(frozen=True)
class Opener:
    """Opens the tables of a task. All processes that train with them call its methods together."""

    plans: Mapping[str, Table]
    workdir: str
    where: Place
    peers: Peers | None
    clock: Clock

    @classmethod
    @contextlib.contextmanager
    def connected(
        cls, plans: Mapping[str, Table], workdir: str, where: Place, clock: Clock
    ) -> Iterator["Opener"]:
        """Connect to the other processes that hold the tables while the block lasts; see `peers_of`."""
        peers = peers_of(where) if plans else None
        try:
            yield cls(plans, workdir, where, peers, clock)
        finally:
            if peers is not None:
                peers.close()

    def of_checkpoint(self, commits: Mapping[str, int]) -> Tables:
        """Open the tables at the commits of process 0 that a checkpoint names.

        Raises ValueError if they are other tables, or a commit is missing, and what `TieredTable` raises.
        Then no table is open in this process.
        """
        if self.plans.keys() != commits.keys():
            raise ValueError(
                f"the checkpoint was saved with the tables {sorted(commits)}, and tables() has "
                f"{sorted(self.plans)}. Resume with the same, or use another workdir."
            )
        return self._opened(lambda name, said: commits[name])

    def anew(self) -> Tables:
        """Open the tables for a new run, as they were before any run of this workdir.

        An earlier run may have committed and died before its first checkpoint.
        """
        own = _own(self.workdir)
        return self._opened(
            lambda name, said: max(
                (n for n, x in said.items() if x.get("workdir") != own), default=0
            )
        )

    def of_step(self, step: int) -> Tables:
        """Open the tables as they were at a step of a run of this workdir.

        Raises ValueError if that step is not kept.
        """

        def found(name: str, said: Said) -> int:
            mine = {n: x for n, x in said.items() if x.get("workdir") == _own(self.workdir)}
            numbers = [n for n, x in mine.items() if x["step"] == step]
            if not numbers:
                raise ValueError(
                    f"table {name!r} in {self.plans[name].folder} has no commit of step {step} of "
                    f"{self.workdir}; it has commits of {sorted(x['step'] for x in mine.values())}. "
                    "Rows are kept as long as their checkpoint: take the state of one of these steps."
                )
            return max(numbers)

        return self._opened(found)

    def _opened(self, find: Callable[[str, Said], int]) -> Tables:
        """Open the tables at the commits that `find` chooses by a table's name and its notes in process 0."""
        at = self._chosen(find)
        with contextlib.ExitStack() as undo:
            tables = {
                name: undo.enter_context(
                    plan.open(
                        at=self._own_number(plan, at[name]),
                        device=self.where.layout.replicated,
                        clock=self.clock,
                        share=None if self.peers is None else Share(self.peers, name),
                    )
                )
                for name, plan in self.plans.items()
            }
            undo.pop_all()
        return tables

    def _chosen(self, find: Callable[[str, Said], int]) -> dict[str, Any]:
        """Return the commit of process 0 and its note for each table, the same in all processes.

        If process 0 cannot choose one, all processes raise.
        """
        found: dict[str, Any] = {}
        failure: Exception | None = None
        if not self.plans:
            return found
        if self.where.process_index == 0:
            try:
                chosen = {
                    name: self._with_these_hosts(plan, find(name, _said(plan, 0)))
                    for name, plan in self.plans.items()
                }
                found = {"commits": chosen}
            except (DamagedError, InUse, OSError, ValueError) as error:
                failure = error
                kind = next((k for k in _KINDS if isinstance(error, _KINDS[k])), "value")
                found = {"kind": kind, "error": str(error)}
        found = json.loads(self.where.told("commits of tables", json.dumps(found))[0])
        if failure is not None:
            raise failure
        if "error" in found:
            raise _KINDS[found["kind"]](found["error"])
        return {name: (number, said) for name, (number, said) in found["commits"].items()}

    def _with_these_hosts(self, plan: Table, number: int) -> tuple[int, Mapping[str, Any]]:
        """Return a commit of process 0 and its note; a new one if other processes than these wrote it."""
        said = _said(plan, 0).get(number)
        if said is None:
            if number and self.where.process_count > 1:
                raise _not_there(plan, 0, f"number {number}")
            return (
                number,
                {},
            )  # there is no commit yet, or a damaged one, which is reported when it is opened
        before, now = said.get("hosts", 1), self.where.process_count
        if before == now:
            return number, said
        moved = {**said, "hosts": now}
        resize(
            plan.folder,
            range(before),
            range(now),
            row_bytes=4 * plan.layout.num_words,
            at={
                host: number if host == 0 else _number_of(plan, host, said)
                for host in range(before)
            },
            about=moved,
            num_ids=plan.num_rows,
            **plan.store,
        )
        return max(_said(plan, 0)), moved

    def _own_number(self, plan: Table, chosen: tuple[int, Mapping[str, Any]]) -> int:
        """Return the number of this process's commit with the same note as the chosen one."""
        number, said = chosen
        own = self.where.process_index
        return number if own == 0 or not number else _number_of(plan, own, said)


def committed(
    tables: Tables, workdir: str, step: int, kept: Collection[int], hosts: int = 1
) -> dict[str, int]:
    """Commit all tables with `step`, for this process of `hosts`; returns the commits by table.

    Commits of the steps in `kept` stay. The commits that the run began with stay until they are superseded.
    Raises OSError if the disk cannot be written, RuntimeError if rows were lost in a step that failed.
    """
    about, found = {"step": step, "workdir": _own(workdir), "hosts": hosts}, {}
    for name, table in tables.items():
        own, others = set(), set()
        for number, said in table.commits().items():
            if said.get("workdir") != _own(workdir):
                others.add(number)
            elif said["step"] in kept:
                own.add(number)
        # Until there is a second commit of this run, the checkpoint of the first may not be written yet.
        found[name] = table.save(about, keep=own if len(own) > 1 else own | others)
    return found


def _said(plan: Table, host: int) -> Said:
    return {n: about.get("with", {}) for n, about in commits_in(plan.folder_of(host)).items()}


def _number_of(plan: Table, host: int, said: Mapping[str, Any]) -> int:
    """Return the newest commit of a host with this note.

    Raises ValueError if there is none, DamagedFile if it may be one that cannot be read.
    """
    found = [number for number, one in _said(plan, host).items() if one == said]
    if not found:
        raise _not_there(plan, host, f"with {dict(said)}")
    return max(found)


def _not_there(plan: Table, host: int, which: str) -> ValueError:
    """Return the error for a commit that is missing. Raises DamagedFile if a commit there cannot be read."""
    folder = plan.folder_of(host)
    for path in manifests(folder).values():
        read_manifest(path)
    return ValueError(
        f"{folder} has no commit {which}, and the rows of that host are needed. Where hosts have disks of "
        "their own, start as many as have saved, on the same ones."
    )


def _own(workdir: str) -> str:
    return workdir_of(workdir).identity
