"""Tables and checkpoints as one: which commit of every table belongs to which step.

A checkpoint names the commits that were made just before it. Where a run goes on from it, tables are opened
at those: what a process committed before it was killed, but before the checkpoint was there, is never read.

Of several processes each commits its own rows, and the first one's commits are named; the others' are those
that say the same of themselves. Where a run goes on with more or fewer processes than have saved, the first
one gives each row to its new owner before any table is opened.
"""

import contextlib
import json
import pathlib
import socket
from collections.abc import Callable, Collection, Mapping
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

Tables = Mapping[str, TieredTable]
Said = Mapping[int, Mapping[str, Any]]
"""What was written down with every commit of a table, by number."""
# What the first process raises for all; an OSError of its disk is a ValueError in the others.
_KINDS = {"damaged": DamagedError, "in use": InUse, "value": ValueError}


def peers_of(where: Place) -> Peers | None:
    """The others that hold tables together with this process; they come here together. None: it is alone.

    Raises ConnectionError where one of them cannot be reached.
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
    """Opens the tables of a task, in every process that trains with them: those come together."""

    plans: Mapping[str, Table]
    workdir: str
    where: Place
    peers: Peers | None
    clock: Clock

    def of_checkpoint(self, commits: Mapping[str, int]) -> Tables:
        """The tables at the commits that a checkpoint names, of the first process.

        Raises ValueError where they are other tables or not there, and what `TieredTable` does; none is open
        in this process then.
        """
        if self.plans.keys() != commits.keys():
            raise ValueError(
                f"the checkpoint was saved with the tables {sorted(commits)}, and tables() has "
                f"{sorted(self.plans)}. Resume with the same, or use another workdir."
            )
        return self._opened(lambda name, said: commits[name])

    def anew(self) -> Tables:
        """The tables that a new run begins with: as they were before any run of this workdir.

        Such a run may have committed and died before its first checkpoint.
        """
        own = _own(self.workdir)
        return self._opened(
            lambda name, said: max(
                (n for n, x in said.items() if x.get("workdir") != own), default=0
            )
        )

    def of_step(self, step: int) -> Tables:
        """The tables as they were at a step of a run of this workdir.

        Raises ValueError where that is not kept.
        """

        def found(name: str, said: Said) -> int:
            mine = {n: x for n, x in said.items() if x.get("workdir") == _own(self.workdir)}
            numbers = [n for n, x in mine.items() if x["step"] == step]
            if not numbers:
                raise ValueError(
                    f"table {name!r} in {self.plans[name].folder} has no commit of step {step} of "
                    f"{self.workdir}; it has those of the steps {sorted(x['step'] for x in mine.values())}. "
                    "Rows are kept with the checkpoints that are: take the state of one of those."
                )
            return max(numbers)

        return self._opened(found)

    def _opened(self, find: Callable[[str, Said], int]) -> Tables:
        """The tables at the commits that `find` chooses of the first process's, by name."""
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
        """For each table the first process's commit, and what it says, the same in all processes.

        Where the first one cannot tell, all raise what it raises.
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
        """The first process's commit, made anew where the rows were those of other processes."""
        said = _said(plan, 0).get(number)
        if said is None:
            if number and self.where.process_count > 1:
                raise _not_there(plan, 0, f"number {number}")
            return number, {}  # the beginning; or it is damaged, which opening it says
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
        """This process's commit that says the same as the first one's."""
        number, said = chosen
        own = self.where.process_index
        return number if own == 0 or not number else _number_of(plan, own, said)


def committed(
    tables: Tables, workdir: str, step: int, kept: Collection[int], hosts: int = 1
) -> dict[str, int]:
    """Commit all tables as those of `step`; returns the commits by table, of this process of `hosts`.

    Those of the steps in `kept` stay, and at first those that no run of this workdir has made.
    Raises OSError where a disk refuses, RuntimeError where rows are lost with a step that has failed.
    """
    about, found = {"step": step, "workdir": _own(workdir), "hosts": hosts}, {}
    for name, table in tables.items():
        own, others = set(), set()
        for number, said in table.commits().items():
            if said.get("workdir") != _own(workdir):
                others.add(number)
            elif said["step"] in kept:
                own.add(number)
        # Until one is followed by another, it may not be there yet.
        found[name] = table.save(about, keep=own if len(own) > 1 else own | others)
    return found


def _said(plan: Table, host: int) -> Said:
    return {n: about.get("with", {}) for n, about in commits_in(plan.folder_of(host)).items()}


def _number_of(plan: Table, host: int, said: Mapping[str, Any]) -> int:
    """The newest commit of a host that says this.

    Raises ValueError where there is none, DamagedFile where it may be one that cannot be read.
    """
    found = [number for number, one in _said(plan, host).items() if one == said]
    if not found:
        raise _not_there(plan, host, f"with {dict(said)}")
    return max(found)


def _not_there(plan: Table, host: int, which: str) -> ValueError:
    """That a host has no such commit. Raises DamagedFile where one that lies there cannot be read."""
    folder = plan.folder_of(host)
    for path in manifests(folder).values():
        read_manifest(path)
    return ValueError(
        f"{folder} has no commit {which}, and the rows of that host are needed. Where hosts have disks of "
        "their own, start as many as have saved, on the same ones."
    )


def _own(workdir: str) -> str:
    return str(pathlib.Path(workdir).resolve())
