"""Whose rows are whose when several hosts hold one table, and what moves when there are others.

Host `h` of a table has the folder `host-00000h` with the rows that `owners` gives it. A change of hosts
copies those rows whose owner changes, one in N, and commits at the hosts that take them; the ones that gave
them keep what they have, which nobody asks them for any more. So a change that is cut off can be made again.
"""

import contextlib
import pathlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxgoodput.embedding.hashing import owners
from jaxgoodput.embedding.store import RowStore

AT_ONCE = 2**16


@dataclass(frozen=True)
class MoveReport:
    """What a change of hosts has moved."""

    num_rows: int
    """Of the whole table, as far as rows are stored."""
    num_moved: int
    """Copied from one host to another."""


def host_folder(folder: str | pathlib.Path, host: int) -> pathlib.Path:
    """Where a host's rows are."""
    return pathlib.Path(folder) / f"host-{host:06d}"


def resize(
    folder: str | pathlib.Path,
    old: Sequence[int],
    new: Sequence[int],
    *,
    row_bytes: int,
    at: Mapping[int, int] | None = None,
    about: Mapping[str, Any] | None = None,
    **store: Any,
) -> MoveReport:
    """Give each row that `old` hosts have to its owner among `new`; rows are copied bit for bit.

    Every host's newest commit counts, or the one that `at` names; hosts of `new` alone begin with nothing
    then. All must be of one save: what was written down with them has to be the same. It is found again with
    the commits that this makes, unless those are to say something else, `about`. No commit is forgotten.

    Raises:
      FileNotFoundError: a host of `old` has no folder, or no commit.
      ValueError: the commits are of different saves, or a host of `new` holds another table.
      InUse, Damaged: as `RowStore` does.
    """
    with contextlib.ExitStack() as stack:

        def opened(host: int) -> RowStore:
            begin = None if at is None else at[host] if host in old else 0
            there = RowStore(host_folder(folder, host), row_bytes=row_bytes, at=begin, **store)
            return stack.enter_context(there)

        for host in old:
            if not (host_folder(folder, host) / "commits").is_dir():
                raise FileNotFoundError(
                    f"{host_folder(folder, host)} is not there, and its rows are needed. Give `old` the "
                    f"hosts that the table was saved by; it is {list(old)}."
                )
        stores = {host: opened(host) for host in sorted({*old, *new})}
        said = _of_one_save({host: stores[host] for host in old})
        for host in {*new} - {*old}:
            _check_same_table(stores[host], said)
        num_rows = num_moved = 0
        for host in old:
            ids = stores[host].ids()
            ids = ids[owners(ids, old) == host]  # not what it gave away before
            num_rows += len(ids)
            to = owners(ids, new)
            for other in set(new) - {host}:
                leaving = ids[to == other]
                num_moved += len(leaving)
                for start in range(0, len(leaving), AT_ONCE):
                    some = leaving[start : start + AT_ONCE]
                    stores[other].put(some, stores[host].get(some).rows)
        if about is not None:
            said = {**said, "with": dict(about)}
        for host in new:
            stores[host].commit(said, keep=stores[host].commits())
        return MoveReport(num_rows, num_moved)


def _of_one_save(stores: dict[int, RowStore]) -> Any:
    """What was written down with the newest commits of all."""
    found = {}
    for host, store in stores.items():
        if store.newest is None:
            raise FileNotFoundError(
                f"{store.folder} has no commit, so that its rows are not known. Save the table on every host "
                "before its hosts change."
            )
        found[host] = store.newest.about
    first, *others = found.values()
    if any(other != first for other in others):
        raise ValueError(
            f"The newest commits are of different saves: {found}. Open each host's table at the commit of "
            "the same one, and save it, before the hosts change."
        )
    return first


def _check_same_table(store: RowStore, about: Any) -> None:
    """Raises ValueError where a store holds another table, whatever save of it was the last."""
    commits = store.commits()
    if not commits:
        return
    there, wanted = (
        {name: value for name, value in one.items() if name != "with"}
        for one in (commits[max(commits)], about)
    )
    if there != wanted:
        raise ValueError(
            f"{store.folder} holds another table, made with {there}, and the rows that it would get are of "
            f"one made with {wanted}. Move that folder away, or give its host no rows."
        )
