"""One holder at a time: refused while it lives, taken when it has died, and the loser changes nothing."""

import dataclasses
import os
import subprocess
import sys
import threading

import buckets
import pytest

from jaxgoodput._disk import InUse
from jaxgoodput._fields import serial
from jaxgoodput.workdir import tenure
from jaxgoodput.workdir.listing import KEY, Found, Holder, Listing, StoredPiece, packed, read
from jaxgoodput.workdir.objects import Changed, PatientStore, StoreError, Unavailable
from jaxgoodput.workdir.tenure import LEASE_S, RENEW_S, Tenure, WorkdirTaken, this_process

FILES = {"a": (StoredPiece("workdir.pieces/1.1/a@0", 3, "sum"),)}


@pytest.fixture
def store():
    return buckets.MemoryStore()


def held_elsewhere(store, **changed):
    """A workdir whose holder is a process of another machine; returns its listing."""
    holder = dataclasses.replace(this_process(), name="process 7 on far", machine="far", **changed)
    found = read(store)
    listing = dataclasses.replace(found.listing.held_by(holder), files=FILES)
    store.replace(KEY, packed(listing), found.generation)
    return listing


def renew_elsewhere(store):
    found = read(store)
    store.replace(KEY, packed(found.listing.next(found.listing.files)), found.generation)


def test_a_workdir_is_held_by_one_and_given_back(store, clock):
    first = Tenure.begin(store, clock)
    first.publish(FILES)
    sleep = clock.sleep

    def renewing(seconds):
        sleep(seconds)
        first.renew()

    clock.sleep = renewing
    with pytest.raises(InUse, match="in use by process .* on ") as refused:
        Tenure.begin(store, clock)
    assert clock.now() <= RENEW_S + 1
    assert not isinstance(refused.value, WorkdirTaken)
    first.end()
    second = Tenure.begin(store, clock)
    assert second.listing.files == FILES
    assert second.listing.tenure == 2


def test_a_holder_elsewhere_that_lives_refuses_by_name(store, clock):
    held_elsewhere(store)
    clock_sleep = clock.sleep

    def sleep(seconds):
        clock_sleep(seconds)
        if clock.now() > RENEW_S:
            renew_elsewhere(store)

    clock.sleep = sleep
    with pytest.raises(InUse, match="process 7 on far"):
        Tenure.begin(store, clock)
    assert clock.now() < 2 * RENEW_S


def test_a_holder_elsewhere_that_died_is_followed_after_its_lease(store, clock):
    held_elsewhere(store)
    Tenure.begin(store, clock).publish(FILES)
    assert LEASE_S <= clock.now() <= LEASE_S + 1


def test_a_process_of_this_machine_that_was_killed_is_followed_at_once(store, clock):
    program = (
        "import sys\nfrom jaxgoodput._fields import serial\n"
        "from jaxgoodput.workdir.tenure import this_process\n"
        "print(serial.dumps(this_process()), flush=True)\nsys.stdin.read()"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with child:
        holder = serial.loads(child.stdout.readline(), Holder)
        store.replace(KEY, packed(read(store).listing.held_by(holder)), None)
        with pytest.raises(InUse, match=f"process {child.pid} on "):
            Tenure.begin(store, clock)
        child.kill()
    Tenure.begin(store, clock)
    assert clock.now() == 0


def test_what_this_process_could_not_give_back_is_its_own_again_after_the_lease(store, clock):
    Tenure.begin(store, clock)
    Tenure.begin(store, clock).publish(FILES)
    assert clock.now() >= LEASE_S


def test_a_number_of_a_process_that_is_used_again_is_not_the_holder(store, clock):
    holder = dataclasses.replace(this_process(), started="1")
    assert tenure.has_ended(holder)
    assert not tenure.runs_here(holder)


def test_who_was_replaced_changes_nothing_and_is_told(store, clock):
    first = Tenure.begin(store, clock)
    first.publish(FILES)
    later = held_elsewhere(store)
    before = dict(store.objects)
    clock.advance(RENEW_S)
    for change in (first.renew, first.end, lambda: first.publish({})):
        with pytest.raises(WorkdirTaken, match="taken by process 7 on far"):
            change()
    assert store.objects == before
    assert read(store).listing == later


def test_of_many_who_find_a_dead_holder_one_follows(store, clock):
    held_elsewhere(store)
    won, refused = [], []
    all_have_read, waited = threading.Barrier(8), threading.local()

    def sleep(seconds):
        if not hasattr(waited, "once"):  # time stands still until each has seen the dead holder
            waited.once = True
            all_have_read.wait(60)
        clock.advance(0.3)

    clock.sleep = sleep

    def begin():
        try:
            won.append(Tenure.begin(store, clock))
        except InUse as error:
            refused.append(error)

    threads = [threading.Thread(target=begin) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1
    assert len(refused) == 7


@pytest.mark.parametrize("arrives", [True, False])
def test_a_request_whose_answer_is_lost_is_repeated_and_counts_once(store, clock, arrives):
    holder = Tenure.begin(PatientStore(store, clock, patience_s=5.0), clock)
    turn, lost = holder.listing.turn, []

    def lose(method, key):
        if method == "replace" and not lost:
            lost.append(key)
            if arrives:  # the store has it, but the answer is cut off
                there = store.objects[KEY]
                store.replace(KEY, wanted, there.generation)
            raise Unavailable("cut off")

    wanted = packed(holder.listing.next(FILES))
    store.before = lose
    holder.publish(FILES)
    store.before = lambda method, key: None
    assert lost
    assert read(store) == Found(holder.listing, store.objects[KEY].generation)
    assert holder.listing.files == FILES
    assert holder.listing.turn == turn + 1
    holder.end()


def test_the_first_request_of_all_may_lose_its_answer_too(store, clock):
    lost = []

    def lose(method, key):
        if method == "replace" and not lost:
            lost.append(key)
            store.replace(KEY, store.sent, None)
            raise Unavailable("cut off")

    replace = store.replace
    store.replace = lambda key, data, generation: (
        setattr(store, "sent", data),
        replace(key, data, generation),
    )[1]
    store.before = lose
    holder = Tenure.begin(PatientStore(store, clock, patience_s=5.0), clock)
    assert read(store).listing == holder.listing
    holder.end()


def test_what_is_no_listing_is_refused_and_stays(store, clock):
    for data in (b"{}", b"\xff", b'{"version": 99, "type": "Listing"}'):
        store.put(KEY, data)
        with pytest.raises(StoreError, match="not the list of files of a run"):
            Tenure.begin(store, clock)
        assert store.objects[KEY].data == data


@pytest.mark.parametrize("path", ["../a", "/etc/x", "a/../../b", ""])
def test_no_file_lies_outside_of_the_folder(store, path):
    listing = dataclasses.replace(read(store).listing, files={path: ()})
    store.put(KEY, packed(listing))
    with pytest.raises(StoreError, match="no path of a file within"):
        read(store)


class Careless(buckets.MemoryStore):
    """A store that does not look at one kind of condition."""

    def __init__(self, ignored):
        super().__init__()
        self.ignored = ignored

    def replace(self, key, data, generation):
        if (generation is None) == (self.ignored == "If-None-Match"):
            return self._write(key, data)
        return super().replace(key, data, generation)


@pytest.mark.parametrize("ignored", ["If-Match", "If-None-Match"])
@pytest.mark.parametrize("is_new", [True, False])
def test_a_store_that_ignores_conditions_is_refused_and_left_free(clock, ignored, is_new):
    store = Careless(ignored)
    if not is_new:
        store.put(KEY, packed(dataclasses.replace(Listing(turn=9, tenure=3), files=FILES)))
    with pytest.raises(StoreError, match="ignores the conditions of writes"):
        Tenure.begin(store, clock)
    left = read(store).listing
    assert left.holder is None
    assert left.files == ({} if is_new else FILES)


def test_a_store_that_refuses_every_condition_is_named(store, clock):
    holder = Tenure.begin(store, clock)
    asked = []

    def refuse(key, data, generation):
        asked.append(key)
        raise Changed(key)

    store.replace = refuse
    clock.advance(RENEW_S)
    for write in (holder.renew, holder.end, lambda: holder.publish(FILES)):
        with pytest.raises(StoreError, match="refuses conditional writes"):
            write()
    assert len(asked) == 3
    store.put(KEY, packed(read(store).listing.held_by(None)))
    with pytest.raises(StoreError, match="refuses conditional writes"):
        Tenure.begin(store, clock)


def test_a_store_that_changes_at_every_turn_ends_the_attempts(store, clock):
    holder = Tenure.begin(store, clock)

    def change(method, key):
        if method == "replace":
            found = read(store)
            store.put(KEY, packed(found.listing.next({})))

    store.before = change
    with pytest.raises(StoreError, match="refuses conditional writes"):
        holder.publish(FILES)


def test_time_in_which_a_watcher_cannot_read_does_not_count(store, clock):
    held_elsewhere(store)
    reads = []

    def slow(method, key):
        if method == "get":
            reads.append(clock.now())
            if len(reads) in (5, 9):
                clock.advance(LEASE_S)

    store.before = slow
    Tenure.begin(store, clock)
    assert LEASE_S <= clock.now() - (reads[8] + LEASE_S) <= LEASE_S + 1


def test_a_holder_that_renews_when_the_store_is_back_is_not_replaced(store, clock):
    held_elsewhere(store)

    def away(method, key):
        if method == "get" and 1 < clock.now() < LEASE_S:
            clock.advance(2 * LEASE_S)  # the answer is from before
        elif method == "get" and clock.now() > 2 * LEASE_S + RENEW_S:
            store.before = lambda method, key: None
            renew_elsewhere(store)

    store.before = away
    with pytest.raises(InUse, match="process 7 on far"):
        Tenure.begin(store, clock)


def test_giving_back_succeeds_though_the_answer_is_lost(store, clock):
    holder = Tenure.begin(PatientStore(store, clock, patience_s=5.0), clock)
    holder.publish(FILES)
    wanted, lost = holder.listing.held_by(None), []

    def lose(method, key):
        if method == "replace" and not lost:
            lost.append(key)
            store.replace(KEY, packed(wanted), store.objects[KEY].generation)
            raise Unavailable("cut off")

    store.before = lose
    holder.end()
    assert lost
    assert read(store).listing == wanted


def test_a_listing_that_was_deleted_is_not_taken_for_another_run(store, clock):
    holder = Tenure.begin(store, clock)
    store.delete(KEY)
    with pytest.raises(WorkdirTaken, match="workdir.json, which says .* was deleted.*life cycle"):
        holder.publish(FILES)
    assert KEY not in store.objects


def test_a_process_that_the_kernel_hides_is_not_taken_for_dead(store, clock, tmp_path, monkeypatch):
    """/proc may be mounted so that it shows a user's own processes only."""
    with subprocess.Popen(["sleep", "100"]) as child:
        started = tenure._started(child.pid)
        assert started
        holder = dataclasses.replace(this_process(), pid=child.pid, started=started)
        assert tenure.runs_here(holder)
        (tmp_path / "sys/kernel/random").mkdir(parents=True)
        (tmp_path / "self/ns").mkdir(parents=True)
        boot = (tenure.PROC / "sys/kernel/random/boot_id").read_text()
        (tmp_path / "sys/kernel/random/boot_id").write_text(boot)
        (tmp_path / "self/ns/pid").symlink_to(os.readlink(tenure.PROC / "self/ns/pid"))
        monkeypatch.setattr(tenure, "PROC", tmp_path)
        assert not tenure.has_ended(holder)
        assert not tenure.runs_here(holder)
        store.replace(KEY, packed(read(store).listing.held_by(holder)), None)
        Tenure.begin(store, clock).end()
        assert LEASE_S <= clock.now() <= LEASE_S + 1
        child.kill()
    assert tenure.has_ended(holder)


def test_a_process_of_another_user_is_there(monkeypatch):
    def kill(pid, signal):
        raise PermissionError(pid)

    monkeypatch.setattr(tenure.os, "kill", kill)
    assert tenure._is_there(1)
