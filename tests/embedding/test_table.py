"""A table that is saved and reopened continues with the same bits; bad batches do no harm."""

import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxgoodput._disk import DamagedError, InUse
from jaxgoodput._jax import listen_for_compilations
from jaxgoodput.clock import FakeClock
from jaxgoodput.embedding.optimizers import Adagrad, Adam, Sgd
from jaxgoodput.embedding.pipeline import Pipeline
from jaxgoodput.embedding.step import row_step
from jaxgoodput.embedding.table import TieredTable

NUM_ROWS, DIM, SAMPLES = 500, 4, 16


def table_in(folder, **changes):
    settings = dict(
        dim=DIM,
        optimizer=Adagrad(0.1),
        num_rows=NUM_ROWS,
        device_rows=50,
        ram_rows=60,
        segment_bytes=2**13,
    )
    return TieredTable(folder, **{**settings, **changes})


def batches(first=0, last=40):
    """Yield batches by number, so that a later run has the same ones."""
    for number in range(first, last):
        rng = np.random.default_rng(number)
        yield {"ids": np.minimum(rng.zipf(1.3, SAMPLES) - 1, NUM_ROWS - 1)}


def loss(params, rows, batch):
    return jnp.mean((rows["t"] @ params - 1.0) ** 2)


class Run:
    """A training run with a table and other parameters."""

    def __init__(self, table):
        self.table, self.params = table, jnp.ones((DIM,))
        self.state = optax.sgd(0.01).init(self.params)
        step = row_step(loss, {"t": table}, optax.sgd(0.01))
        self.step = jax.jit(step, donate_argnums=(0,))
        self.num_trained = 0

    def pipeline(self, stream, **settings):
        return Pipeline({"t": self.table}, stream, lambda batch: {"t": batch["ids"]}, **settings)

    def train(self, pipeline, placed):
        slots, self.params, self.state, _ = self.step(
            placed.slots, self.params, self.state, placed.lookups, {}
        )
        pipeline.trained(slots)
        self.num_trained += 1

    def through(self, stream, **settings):
        with self.pipeline(stream, **settings) as pipeline:
            for placed in pipeline:
                self.train(pipeline, placed)
        return self

    @property
    def rows(self):
        return self.table.rows(np.arange(NUM_ROWS))


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """Return rows and parameters after forty batches."""
    with table_in(tmp_path_factory.mktemp("whole")) as table:
        run = Run(table).through(batches())
        return run.rows, np.asarray(run.params)


@pytest.mark.parametrize("depth", [0, 2])
def test_saved_in_the_middle_and_opened_again_it_goes_on_with_the_same_bits(
    tmp_path, uninterrupted, depth
):
    with table_in(tmp_path) as table:
        run = Run(table)
        with run.pipeline(batches(), depth=depth) as pipeline:
            for placed in pipeline:
                run.train(pipeline, placed)
                if placed.number in (11, 24):
                    table.save(
                        {"step": placed.number + 1, "params": np.asarray(run.params).tolist()}
                    )
                if placed.number == 30:
                    break  # what came after the commit is lost
    # Another division into tiers: only rows are saved.
    with table_in(tmp_path, device_rows=80, ram_rows=100) as table:
        assert table.saved["step"] == 25
        run = Run(table)
        run.params = jnp.array(table.saved["params"], jnp.float32)
        run.through(batches(25), depth=depth)
        rows, params = uninterrupted
        np.testing.assert_array_equal(run.rows, rows)
        np.testing.assert_array_equal(run.params, params)


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_a_pipeline_that_is_closed_early_leaves_the_table_as_it_was_trained(
    tmp_path, uninterrupted, depth
):
    with table_in(tmp_path) as table:
        run = Run(table)
        for first, last in ((0, 13), (13, 14), (14, 40)):
            with run.pipeline(batches(first), depth=depth) as pipeline:  # which reads ahead
                for placed in pipeline:
                    run.train(pipeline, placed)
                    if run.num_trained == last:
                        break
        np.testing.assert_array_equal(run.rows, uninterrupted[0])


def test_only_rows_that_changed_are_saved_again(tmp_path):
    with table_in(tmp_path) as table:
        run = Run(table).through(batches(0, 30))
        table.save()
        before = table.store.traffic.rows_put
        table.save()
        assert table.store.traffic.rows_put == before
        run.through(batches(30, 31))
        table.save()
        assert table.store.traffic.rows_put - before <= SAMPLES


def test_a_row_that_nobody_read_takes_no_place_and_begins_the_same_everywhere(tmp_path):
    with table_in(tmp_path / "a") as one, table_in(tmp_path / "b", num_rows=None) as other:
        ids = np.array([3, 499, 7])
        np.testing.assert_array_equal(one.read(ids), other.read(ids))
        assert not np.array_equal(one.read(ids[:1]), one.read(ids[1:2]))
        one.save()
        assert len(one.store) == 0
    with table_in(tmp_path / "c", seed=1) as another, table_in(tmp_path / "a") as one:
        assert (one.read(ids) != another.read(ids)).all()


def test_ids_of_63_bits_train(tmp_path):
    names = np.random.default_rng(0).integers(0, 2**63 - 2, 300)
    stream = ({"ids": np.random.default_rng(n).choice(names, SAMPLES)} for n in range(60))
    with table_in(tmp_path, num_rows=None) as table:
        Run(table).through(stream)
        assert table.counts.on_disk > 100
        moved = (table.rows(names) != table.initial(names)).any(1)
        assert moved.mean() > 0.8


# -- what cannot be ----------------------------------------------------------------------------------

BAD = {
    "negative": (np.array([3, -1, 4]), ValueError, r"Table 't': id -1 at \(1,\) .* 0 to 499"),
    "too large": (np.array([[3, 4], [500, 4]]), ValueError, r"id 500 at \(1, 0\) of the batch"),
    "floats": (np.array([1.0, 2.0]), TypeError, "ids have dtype float"),
    "too many": (np.arange(51), ValueError, "reads 51 different rows, .*device_rows=50"),
}


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("kind", BAD)
def test_bad_ids_are_named_when_their_turn_comes_and_change_nothing(tmp_path, kind, depth):
    ids, error, message = BAD[kind]
    with table_in(tmp_path / "bad") as table, table_in(tmp_path / "good") as other:
        run = Run(table)
        with pytest.raises(error, match=message):
            run.through([*batches(0, 5), {"ids": ids}, *batches(5, 9)], depth=depth)
        assert run.num_trained == 5
        np.testing.assert_array_equal(run.rows, Run(other).through(batches(0, 5)).rows)
        run.through(batches(5, 9))  # and it can go on
        assert run.num_trained == 9


def test_a_stream_that_fails_is_raised_behind_the_batches_before(tmp_path):
    def stream():
        yield from batches(0, 7)
        raise OSError("the reader's disk is gone")

    with table_in(tmp_path) as table:
        run = Run(table)
        with pytest.raises(OSError, match="the reader's disk"):
            run.through(stream())
        assert run.num_trained == 7


@pytest.mark.parametrize("depth", [0, 1])
def test_whatever_ends_a_stage_is_heard_by_the_caller(tmp_path, monkeypatch, depth):
    def stream():
        yield from batches(0, 3)
        raise SystemExit(3)

    with table_in(tmp_path) as table:
        with Run(table).pipeline(stream(), depth=depth) as pipeline, pytest.raises(SystemExit):
            for placed in pipeline:
                pipeline.trained(placed.slots)

        def ends(*_, **__):
            raise SystemExit(4)

        monkeypatch.setattr(table, "load", ends)
        with Run(table).pipeline(batches(), depth=depth) as pipeline, pytest.raises(SystemExit):
            next(pipeline)


@pytest.mark.parametrize("depth", [0, 1])
def test_a_stop_iteration_out_of_ids_is_not_the_end_of_the_batches(tmp_path, depth):
    def ids(batch):
        return next(iter([]))

    with table_in(tmp_path) as table:
        with Pipeline({"t": table}, batches(), ids, depth=depth) as pipeline:
            with pytest.raises(RuntimeError, match="StopIteration"):
                next(pipeline)


def test_what_pull_waits_is_not_taken_from_the_time_of_other_stages(tmp_path, monkeypatch):
    clock = FakeClock()
    with table_in(tmp_path) as table, Run(table).pipeline([], clock=clock) as pipeline:

        def run(_):
            clock.advance(3.0)
            table.counts.waited_s += 2.0  # of another batch, in `pull`

        monkeypatch.setattr(pipeline, "_pull", run)
        monkeypatch.setattr(pipeline, "_load", run)
        for stage, busy_s in (("pull", 1.0), ("load", 3.0)):
            before = pipeline.times.busy_s[stage]
            pipeline._timed(stage, None)
            assert pipeline.times.busy_s[stage] - before == busy_s


def test_a_batch_has_to_be_given_back_before_the_next(tmp_path):
    with table_in(tmp_path) as table, Run(table).pipeline(batches()) as pipeline:
        placed = next(pipeline)
        with pytest.raises(RuntimeError, match="Batch 0 was not given back"):
            next(pipeline)
        pipeline.trained(placed.slots)
        with pytest.raises(RuntimeError, match="No batch was handed out"):
            pipeline.trained(placed.slots)


def test_ids_of_other_tables_are_named(tmp_path):
    with table_in(tmp_path) as table:
        with Pipeline({"t": table}, batches(), lambda batch: {"u": batch["ids"]}) as pipeline:
            with pytest.raises(ValueError, match=r"for the tables \['u'\].* has \['t'\]"):
                next(pipeline)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dim": 5}, "rows of"),
        ({"optimizer": Adam(0.1)}, "rows of"),
        ({"optimizer": Sgd(0.1), "dim": 8}, "made with .*squares.* but it was opened with"),
        ({"seed": 1}, "'seed': 0.*'seed': 1"),
        ({"dtype": "bfloat16", "dim": 4}, "rows of|made with"),
    ],
)
def test_a_table_that_is_opened_as_another_is_refused_and_stays(tmp_path, changes, message):
    with table_in(tmp_path) as table:
        rows = Run(table).through(batches(0, 20)).rows
        table.save()
    with pytest.raises(ValueError, match=message):
        table_in(tmp_path, **changes)
    with table_in(tmp_path) as table:
        np.testing.assert_array_equal(table.rows(np.arange(NUM_ROWS)), rows)
        with pytest.raises(InUse):
            table_in(tmp_path)


@pytest.mark.parametrize(
    "changes", [{"ram_rows": 49}, {"dim": 0}, {"device_rows": 0}, {"dtype": "float16"}]
)
def test_sizes_that_cannot_work_are_named(tmp_path, changes):
    with pytest.raises(ValueError, match=f"{next(iter(changes))}="):
        table_in(tmp_path, **changes)


def test_a_damaged_table_offers_the_commit_before(tmp_path):
    with table_in(tmp_path) as table:
        run = Run(table).through(batches(0, 10))
        rows = run.rows
        first = table.save({"step": 10})
        run.through(batches(10, 20))
        table.save({"step": 20})
        newest = max(tmp_path.glob("*.rows"))
    content = bytearray(newest.read_bytes())
    content[40] ^= 4
    newest.write_bytes(content)
    with pytest.raises(DamagedError, match=rf"{newest.name}.*at={first}"):
        table_in(tmp_path)
    with table_in(tmp_path, at=first) as table:
        assert table.saved == {"step": 10}
        np.testing.assert_array_equal(table.rows(np.arange(NUM_ROWS)), rows)


def test_an_error_in_writing_back_reaches_the_training_loop(tmp_path, monkeypatch):
    with table_in(tmp_path) as table:
        run = Run(table)

        def fails(evicted):
            raise RuntimeError("the device is gone")

        monkeypatch.setattr(table, "write_back", fails)
        with pytest.raises(RuntimeError, match="the device is gone"):
            run.through(batches())
    assert not [t for t in threading.enumerate() if t.name.startswith("jaxgoodput-table ")]


@pytest.mark.parametrize("depth", [0, 1])
def test_rows_that_were_leaving_when_ctrl_c_came_are_not_lost(tmp_path, monkeypatch, depth):
    def interrupted(*_):
        raise KeyboardInterrupt

    with table_in(tmp_path / "cut") as table, table_in(tmp_path / "whole") as other:
        run = Run(table)
        with pytest.raises(KeyboardInterrupt), run.pipeline(batches(), depth=depth) as pipeline:
            while run.num_trained < 20:
                run.train(pipeline, next(pipeline))
            with monkeypatch.context() as patch:
                if depth:
                    patch.setattr(pipeline._evicted, "put", interrupted)
                else:
                    patch.setattr(pipeline, "_write_back", interrupted)
                next(pipeline)
        expected = Run(other).through(batches(0, 20)).rows
        np.testing.assert_array_equal(run.rows, expected)
        table.save()
        run.through(batches(20))  # and it can go on
        assert run.num_trained == 40


def test_the_rows_of_two_tables_are_not_lost_where_one_cannot_place_a_batch(tmp_path, monkeypatch):
    with table_in(tmp_path / "a") as one, table_in(tmp_path / "b") as two:
        tables = {"a": one, "b": two}
        with pytest.raises(RuntimeError, match="the device is gone"):
            with Pipeline(
                tables, batches(), lambda batch: dict.fromkeys(tables, batch["ids"])
            ) as pipeline:
                while (placed := next(pipeline)).number < 20:
                    pipeline.trained(placed.slots)
                pipeline.trained(placed.slots)

                def fails(_):
                    raise RuntimeError("the device is gone")

                monkeypatch.setattr(two, "place", fails)
                next(pipeline)
        everything = np.arange(NUM_ROWS)
        np.testing.assert_array_equal(one.rows(everything), two.rows(everything))


def test_a_table_whose_rows_were_not_written_back_says_so_rather_than_wait(tmp_path):
    with table_in(tmp_path) as table:
        Run(table).through(batches(0, 20))
        table._placed += 1
        table.settle()
        with pytest.raises(RuntimeError, match="were not written back. Open the table again"):
            table.save()


def test_a_pipeline_that_is_closed_again_leaves_the_next_one_alone(tmp_path, uninterrupted):
    with table_in(tmp_path) as table:
        run = Run(table)
        with run.pipeline(batches(0, 20)) as first:
            for placed in first:
                run.train(first, placed)
        with run.pipeline(batches(20)) as second:
            run.train(second, next(second))
            first.close()
            for placed in second:
                run.train(second, placed)
        np.testing.assert_array_equal(run.rows, uninterrupted[0])


def test_a_step_that_fails_with_the_rows_in_its_hands_says_what_is_left(tmp_path):
    with table_in(tmp_path) as table:
        run = Run(table).through(batches(0, 5))
        rows = run.rows
        table.save()
        with pytest.raises(ZeroDivisionError), run.pipeline(batches(5)) as pipeline:
            placed = next(pipeline)
            run.step(placed.slots, run.params, run.state, placed.lookups, {})
            raise ZeroDivisionError
        with pytest.raises(RuntimeError, match="Open the table again; it is as it was saved last"):
            table.save()
    with table_in(tmp_path) as table:
        np.testing.assert_array_equal(table.rows(np.arange(NUM_ROWS)), rows)


def test_few_programs_are_compiled_whatever_the_number_of_rows(tmp_path):
    compiled = []
    with table_in(tmp_path, device_rows=400, ram_rows=400) as table:
        run = Run(table)
        rng = np.random.default_rng(0)
        run.through([{"ids": np.arange(300)}])
        stop = listen_for_compilations(compiled.append)
        # The same shape of ids, and from 1 to 300 different ones.
        run.through([{"ids": rng.integers(0, n, 300)} for n in range(1, 301, 3)])
        stop()
    sizes = 6  # 64, 96, 128, 192, 256, 384
    names = [one.name for one in compiled]
    assert names.count("step") <= sizes and len(names) <= 3 * sizes, names


def test_where_the_slots_do_not_fit_the_folder_is_let_go_of(tmp_path, monkeypatch):
    def refuses(*_, **options):
        raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory")

    sizes: dict[str, Any] = {"dim": 2, "optimizer": Sgd(0.1), "device_rows": 4, "ram_rows": 4}
    with monkeypatch.context() as patch:
        patch.setattr(jnp, "zeros", refuses)
        with pytest.raises(RuntimeError, match="RESOURCE_EXHAUSTED"):
            TieredTable(tmp_path, **sizes)
    TieredTable(tmp_path, **sizes).close()  # not InUse
