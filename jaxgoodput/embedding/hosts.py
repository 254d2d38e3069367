"""Moves rows between the folders of hosts when a table is to be held by other hosts.

Host `h` has the folder `host-00000h` with the rows that `owners` assigns to it. `resize` copies the rows
whose owner changes and commits them at their new owners. The old owners keep their copies, which are never
read again, so that an interrupted `resize` can simply be repeated.
"""

import contextlib
import pathlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxgoodput.embedding.hashing import owners
from jaxgoodput.embedding.store import RowStore

COPIED_AT_ONCE = 2**16


@dataclass(frozen=True)
class MoveReport:
    """How many rows a table has, and how many of them `resize` copied to other hosts."""

    num_rows: int
    """Rows of the whole table that are stored."""
    num_moved: int
    """Rows that were copied from one host to another."""


def host_folder(folder: str | pathlib.Path, host: int) -> pathlib.Path:
    """Return the folder, below a table's folder, that holds the rows of one host."""
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
    """Give every row of the hosts `old` to its owner among `new`. Rows are copied bit for bit.

    Use this before a saved table is opened by another set of hosts. Rows come from each host's newest commit,
    or from the commit that `at` names; hosts only in `new` then start empty. All commits must belong to the
    same save. The new commits carry the metadata `about`; if None, the metadata of the old ones. No commit is
    deleted. `store` is passed to `RowStore`.

    Raises:
      FileNotFoundError: a host of `old` has no folder, or no commit.
      ValueError: the commits belong to different saves, or a host of `new` holds another table.
      InUse, DamagedError: see `RowStore`.
    """
    with contextlib.ExitStack() as stack:

        def opened(host: int) -> RowStore:
            begin = None if at is None else at[host] if host in old else 0
            there = RowStore(host_folder(folder, host), row_bytes=row_bytes, at=begin, **store)
            return stack.enter_context(there)

        for host in old:
            if not (host_folder(folder, host) / "commits").is_dir():
                raise FileNotFoundError(
                    f"{host_folder(folder, host)} is missing, and its rows are needed. Set `old` to the "
                    f"hosts that the table was saved by; it is {list(old)}."
                )
        stores = {host: opened(host) for host in sorted({*old, *new})}
        shared = _shared_about({host: stores[host] for host in old})
        for host in {*new} - {*old}:
            _check_same_table(stores[host], shared)
        counts = [_copy_rows(host, old, new, stores) for host in old]
        if about is not None:
            shared = {**shared, "with": dict(about)}
        for host in new:
            stores[host].commit(shared, keep=stores[host].commits())
        return MoveReport(sum(n for n, _ in counts), sum(n for _, n in counts))


def _copy_rows(
    host: int, old: Sequence[int], new: Sequence[int], stores: Mapping[int, RowStore]
) -> tuple[int, int]:
    """Copy rows of this host that other hosts will own to them; return how many it owned, and moved."""
    ids = stores[host].ids()
    ids = ids[owners(ids, old) == host]  # without copies of rows that it gave away earlier
    owner, num_moved = owners(ids, new), 0
    for other in set(new) - {host}:
        leaving = ids[owner == other]
        num_moved += len(leaving)
        for start in range(0, len(leaving), COPIED_AT_ONCE):
            some = leaving[start : start + COPIED_AT_ONCE]
            stores[other].put(some, stores[host].get(some).rows)
    return len(ids), num_moved


def _shared_about(stores: dict[int, RowStore]) -> Any:
    """Return the metadata in the stores' newest commits, which must be the same in all."""
    found = {}
    for host, store in stores.items():
        if store.newest is None:
            raise FileNotFoundError(
                f"{store.folder} has no commit, so its rows are unknown. Save the table on every host "
                "before you change its hosts."
            )
        found[host] = store.newest.about
    first, *others = found.values()
    if any(other != first for other in others):
        raise ValueError(
            f"The newest commits belong to different saves: {found}. Open each host's table at the commit "
            "of the same save, and save it, before you change the hosts."
        )
    return first


def _check_same_table(store: RowStore, about: Any) -> None:
    """Raise ValueError if a store holds another table. Any save of the same table is fine."""
    commits = store.commits()
    if not commits:
        return
    there, wanted = (
        {name: value for name, value in one.items() if name != "with"}
        for one in (commits[max(commits)], about)
    )
    if there != wanted:
        raise ValueError(
            f"{store.folder} holds another table, made with {there}, and the rows to be copied there belong "
            f"to one made with {wanted}. Move that folder away, or leave its host out of `new`."
        )
