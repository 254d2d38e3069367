"""Processes that share a table have, together, the rows of a dense one. Here each process is a thread."""

import itertools
import socket
import threading

import jax
import numpy as np
import optax
import pytest
from dense_tables import SIZES, STEPS, batches, dense, ids_of, loss, parameters
from peer_threads import together

from jaxgoodput import _wire
from jaxgoodput.embedding.hosts import host_folder, resize
from jaxgoodput.embedding.optimizers import Adagrad
from jaxgoodput.embedding.peers import Share
from jaxgoodput.embedding.pipeline import Pipeline
from jaxgoodput.embedding.step import row_step
from jaxgoodput.embedding.table import TieredTable

TIERS = {"user": (90, 100), "item": (200, 210)}  # slots on the device and in the RAM of each
SEGMENT_BYTES = 2**14


def opened(folder, rank, peers):
    return {
        name: TieredTable(
            host_folder(folder / name, rank),
            dim=dim,
            optimizer=Adagrad(0.1),
            num_rows=size,
            device_rows=TIERS[name][0],
            ram_rows=TIERS[name][1],
            device=jax.devices()[rank],
            share=Share(peers, name),
            segment_bytes=SEGMENT_BYTES,
        )
        for name, (size, dim) in SIZES.items()
    }


class Job:
    """Train the batches of one dense run in parts, each with its own number of processes."""

    def __init__(self, folder):
        self.folder = folder
        self.params = jax.device_get(parameters())
        self.losses = []
        self.counts = []

    def train(self, count, parts):
        """Train the batches of each of `parts`, with a new pipeline for each."""

        def run(rank, peers):
            tables, losses = opened(self.folder, rank, peers), []
            tx = optax.sgd(0.05)
            params = jax.device_put(self.params, jax.devices()[rank])
            opt_state = tx.init(params)
            step = jax.jit(row_step(loss, tables, tx), donate_argnums=(0, 1, 2))
            for first, last in itertools.pairwise(parts):
                # The pipeline is given more batches than are trained, as when the batch size changes.
                some = itertools.islice(batches(), first, None)
                pipeline = Pipeline(tables, some, ids_of, depth=1)
                for placed in itertools.islice(pipeline, last - first):
                    slots, params, opt_state, value = step(
                        placed.slots,
                        params,
                        opt_state,
                        placed.lookups,
                        {"label": placed.batch["label"]},
                    )
                    pipeline.trained(slots)
                    losses.append(value)
                peers.stop("the part is over")
                pipeline.close()
                peers.begin()
            wanted = {name: np.arange(rank, size) for name, (size, _) in SIZES.items()}
            rows = {name: table.rows(wanted[name]) for name, table in tables.items()}
            slots = {name: np.asarray(table.slots) for name, table in tables.items()}
            for table in tables.values():
                table.save({"step": parts[-1]})
                table.close()
            whole = {name: table.layout.unpack_host(rows[name]) for name, table in tables.items()}
            counts = [table.counts for table in tables.values()]
            return jax.device_get(params), jax.device_get(losses), whole, slots, counts

        found = together(count, run)
        self.params, losses, rows, slots, _ = found[0]
        self.losses += losses
        for rank, (params, others, theirs, their_slots, counts) in enumerate(found):
            assert others == losses
            for name in self.params:
                np.testing.assert_array_equal(params[name], self.params[name])
            for name in slots:  # the same rows in the same places, on every device
                np.testing.assert_array_equal(their_slots[name], slots[name])
            for name, fields in theirs.items():  # whichever tier they are in
                for field, values in fields.items():
                    np.testing.assert_array_equal(values, rows[name][field][rank:])
            self.counts += counts
        return rows

    def resize(self, old, new):
        for name, (_, dim) in SIZES.items():
            words = 2 * dim
            moved = resize(
                self.folder / name,
                range(old),
                range(new),
                row_bytes=4 * words,
                segment_bytes=SEGMENT_BYTES,
            )
            assert 0 < moved.num_moved < moved.num_rows


@pytest.mark.slow
def test_rows_of_one_then_three_then_two_processes_have_the_bits_of_a_dense_table(tmp_path):
    expected, losses = dense(Adagrad(0.1), "float32")
    job = Job(tmp_path)
    job.train(1, [0, 60])
    job.resize(1, 3)
    job.train(3, [60, 85, 130])
    job.resize(3, 2)
    rows = job.train(2, [130, 131, STEPS])
    np.testing.assert_array_equal(np.array(job.losses), losses)
    for table, fields in rows.items():
        for field, found in fields.items():
            np.testing.assert_array_equal(found, expected[table][field], err_msg=f"{table} {field}")
    for counts in job.counts:
        assert min(counts.on_device, counts.in_ram, counts.on_disk, counts.new) > 10


def test_a_round_ends_when_a_process_goes_or_it_is_stopped():
    others = threading.Barrier(2)

    def run(rank, peers):
        assert [int(x[0]) for x in peers.gather("a", 0, np.array([rank]))] == [0, 1, 2]
        if rank == 2:
            return None
        with pytest.raises(ConnectionError, match="process 2, which holds a part"):
            peers.gather("a", 1, np.array([rank]))
        peers.stop("it is over")
        with pytest.raises(RuntimeError, match="it is over"):
            peers.gather("a", 2, np.array([rank]))
        others.wait()
        return None

    together(3, run)


def test_a_round_ends_when_a_connection_times_out_in_the_middle_of_a_message(monkeypatch):
    ready, sent = threading.Barrier(2), threading.Event()

    def timed_out(message):
        raise TimeoutError("Connection timed out")

    def run(rank, peers):
        if rank == 0:
            monkeypatch.setattr(peers._channels[1], "receive_bytes", timed_out)
        ready.wait()
        if rank == 1:
            try:
                return peers.gather("a", 0, np.array([rank]))
            finally:
                sent.set()
        with pytest.raises(ConnectionError, match="process 1, which holds a part"):
            peers.gather("a", 0, np.array([rank]))
        sent.wait(
            30
        )  # closing the connection now would fail the other one, which may still be sending
        return None

    together(2, run)


def test_what_was_said_before_a_new_beginning_is_not_heard_behind_it():
    def run(rank, peers):
        if rank == 0:  # one round ahead, which the other process never joins
            with pytest.raises(RuntimeError):
                threading.Timer(0.2, peers.stop, ["stopped"]).start()
                peers.gather("a", 0, np.array([7]))
        peers.begin()
        return [int(x[0]) for x in peers.gather("a", 0, np.array([rank]))]

    assert together(2, run) == [[0, 1], [0, 1]]


def test_processes_that_have_planned_differently_say_so():
    def run(rank, peers):
        ids, slots = np.arange(20), np.arange(20, dtype=np.int32)
        share = Share(peers, "user")
        own = np.full((int(share.owned(ids).sum()), 3), rank, np.uint32)
        rows = share.rows(0, ids, slots, own)
        np.testing.assert_array_equal(rows[:, 0], share.owner(ids))
        with pytest.raises(RuntimeError, match="round 1 of 'user: rows' .* planned differently"):
            share.rows(1, ids, slots[:: 1 - 2 * rank], own)  # the same ids for other slots
        with pytest.raises(RuntimeError, match="round 2 of 'user: coming' .* planned differently"):
            share.most("coming", 2, np.zeros(5 + rank), ids[: 5 + rank])

    together(2, run)


@pytest.mark.parametrize("secret", ["another one", None])
def test_a_stranger_is_left_outside(secret):
    refused = []

    def strange(address):
        if secret is None:
            host, _, port = address.rpartition(":")
            socket.create_connection((host, int(port))).close()
            return
        try:
            channel = _wire.connect(address, secret, timeout_s=5.0)
            channel.send({"type": "peer", "rank": 1})
            channel.close()
        except ConnectionError as error:
            refused.append(error)

    def run(rank, peers):
        return [int(x[0]) for x in peers.gather("a", 0, np.array([rank]))]

    assert together(2, run, first=strange) == [[0, 1], [0, 1]]
    assert len(refused) == (secret is not None)


def test_strangers_that_say_nothing_keep_nobody_waiting(monkeypatch):
    monkeypatch.setattr(_wire, "_HELLO_S", 3600.0)  # beyond what processes wait for each other
    held = []

    def strange(address):
        host, _, port = address.rpartition(":")
        held.extend(socket.create_connection((host, int(port))) for _ in range(5))

    try:
        assert together(3, lambda rank, peers: rank, first=strange) == [0, 1, 2]
    finally:
        for sock in held:
            sock.close()
