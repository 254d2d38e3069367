"""Where what a job of several processes needs of a table is damaged or held, all of them hear the same."""

import dataclasses
import threading
from typing import Any

import jax
import numpy as np
import pytest
from peer_threads import together

from jaxgoodput._disk import DamagedError, InUse
from jaxgoodput.clock import FakeClock
from jaxgoodput.embedding.optimizers import Sgd
from jaxgoodput.embedding.plan import Table
from jaxgoodput.embedding.store import RowStore, manifests
from jaxgoodput.parallel.place import Place
from jaxgoodput.parallel.strategy import Strategy
from jaxgoodput.train.tables.commits import Opener, committed

IDS = np.arange(100)


def plan_in(folder):
    return Table(
        folder=str(folder / "t"), dim=2, optimizer=Sgd(0.1), device_rows=8, ram_rows=8, num_rows=100
    )


@dataclasses.dataclass(frozen=True)
class Here(Place):
    """One thread's place among those that stand for processes."""

    said: Any = None
    come: Any = None

    def told(self, what: str, value: str) -> list[str]:
        self.come.wait()
        self.said[self.process_index] = value
        self.come.wait()
        return [self.said[rank] for rank in range(self.process_count)]


def in_processes(folder, count, run):
    """What `run(opener)` returns in each of so many processes, which are threads."""
    said, come = {}, threading.Barrier(count, timeout=20.0)

    def of(rank, peers):
        where = Here(
            layouts={"": Strategy().on([jax.devices()[rank]])},
            world=None,
            process_index=rank,
            process_count=count,
            said=said,
            come=come,
        )
        plans = {"t": plan_in(folder)}
        return run(Opener(plans, str(folder), where, peers if count > 1 else None, FakeClock()))

    return together(count, of)


def save(folder, count, steps):
    """Commits of so many processes, in which every row is that of the last step."""

    def run(opener):
        tables = opener.anew()
        store = tables["t"].store
        for step in steps:
            store.put(IDS, np.full((100, store.row_bytes // 8), step, np.uint64))
            committed(tables, str(folder), step, steps, hosts=count)
        tables["t"].close()

    in_processes(folder, count, run)


def opened_at(folder, count, number):
    """The step that each process finds at a commit of the first one, or what it raises."""

    def run(opener):
        try:
            with opener.of_checkpoint({"t": number})["t"] as table:
                return table.saved["step"]
        except Exception as error:
            return next(
                kind for kind in (DamagedError, InUse, ValueError) if isinstance(error, kind)
            )

    return in_processes(folder, count, run)


@pytest.mark.parametrize("host", [0, 1])
def test_a_damaged_manifest_of_any_process_is_damage_and_the_commit_before_can_be_used(
    tmp_path, host
):
    save(tmp_path, 2, [10, 20])
    assert opened_at(tmp_path, 2, 2) == [20, 20]
    newest, path = next(iter(manifests(plan_in(tmp_path).folder_of(host)).items()))
    assert newest == 2
    path.write_text("damaged")
    assert opened_at(tmp_path, 2, 2) == [DamagedError if host == 0 else 20, DamagedError]
    assert opened_at(tmp_path, 2, 1) == [10, 10]


@pytest.mark.parametrize("count", [1, 3])
def test_where_another_number_of_processes_goes_on_damage_is_damage_in_all(tmp_path, count):
    save(tmp_path, 2, [10, 20])
    manifests(plan_in(tmp_path).folder_of(1))[2].write_text("damaged")
    assert opened_at(tmp_path, count, 2) == count * [DamagedError]
    assert opened_at(tmp_path, count, 1) == count * [10]


def test_rows_that_another_process_holds_are_in_use_for_all(tmp_path):
    save(tmp_path, 1, [10])
    folder = plan_in(tmp_path).folder_of(0)
    with RowStore(folder, row_bytes=8):
        assert opened_at(tmp_path, 2, 1) == [InUse, InUse]
    assert opened_at(tmp_path, 2, 1) == [10, 10]


def test_a_commit_that_is_not_there_is_no_damage(tmp_path):
    save(tmp_path, 2, [10])
    assert opened_at(tmp_path, 2, 7) == [ValueError, ValueError]
