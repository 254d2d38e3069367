"""`Tenure`: one process's hold of a workdir in a bucket, from taking it until it gives it back or loses it.

A holder renews its hold every `RENEW_S` seconds by writing the listing anew. A process that
finds a listing which has not changed for `LEASE_S` seconds, by its own clock, may take the workdir. No two
clocks are compared. The holder before, if it still runs, cannot change anything from then on: see `Listing`.
"""

import os
import pathlib
import socket
import threading
import uuid
from collections.abc import Callable

from absl import logging

from jaxgoodput._disk import InUse
from jaxgoodput.clock import Clock
from jaxgoodput.workdir.listing import KEY, PIECES, Files, Found, Holder, Listing, packed, read
from jaxgoodput.workdir.objects import Changed, ObjectStore, StoreError

RENEW_S = 5.0
LEASE_S = 30.0
LOOK_S = 0.5
MOST_TURNS = 10  # in which a write may find that an earlier one of ours has arrived

PROC = pathlib.Path("/proc")


class WorkdirTaken(InUse):
    """Another process has taken the workdir."""


class Tenure:
    """Holds the workdir of `store`, and replaces its listing. All methods are thread-safe."""

    def __init__(self, store: ObjectStore, held: Found, clock: Clock):
        assert held.listing.holder is not None
        self.listing = held.listing  # as last written
        self._generation = held.generation
        self._holder = held.listing.holder
        self._store = store
        self._clock = clock
        self._lock = threading.Lock()
        self._written_s = clock.now()

    @classmethod
    def begin(cls, store: ObjectStore, clock: Clock) -> "Tenure":
        """Take the workdir of a store.

        If another process holds it and may have died, this waits until that has not renewed its hold for
        `LEASE_S`. Raises InUse, which names the holder, as soon as it is known to live, and StoreError if
        objects that are not known lie in the way, or the store has no conditional writes.
        """
        tenure = cls._taken(store, clock)
        try:
            tenure._require_conditions()
        except BaseException:
            tenure.end()
            raise
        return tenure

    @classmethod
    def _taken(cls, store: ObjectStore, clock: Clock) -> "Tenure":
        own = this_process()
        found, since_s = read(store), clock.now()
        if found.generation is None:
            _require_unused(store)
        is_watching = False
        while True:
            holder = found.listing.holder
            is_over = holder is None or has_ended(holder) or clock.now() - since_s >= LEASE_S
            if is_over:
                wanted = found.listing.held_by(own)
                try:
                    generation = store.replace(KEY, packed(wanted), found.generation)
                    return cls(store, Found(wanted, generation), clock)
                except Changed:
                    there = read(store)
                    if there.listing.holder == own:  # an earlier attempt of the same request
                        return cls(store, there, clock)
                    if there.generation == found.generation:
                        raise _refuses(store) from None
            else:
                assert holder is not None
                if runs_here(holder):
                    raise _in_use(store, holder)
                if not is_watching:
                    is_watching = True
                    logging.warning(
                        "%s is held by %s, which may have died. If it does not renew its hold within %.0f s, "
                        "this run takes the workdir.",
                        *(store.url, holder.name, LEASE_S),
                    )
                clock.sleep(LOOK_S)
                asked_s = clock.now()
                there = read(store)
                # What was read may be that old. If the store was away, the holder could not renew either.
                if clock.now() - asked_s > RENEW_S:
                    since_s = clock.now()
            if there.generation != found.generation:
                if there.listing.holder is not None and not has_ended(there.listing.holder):
                    raise _in_use(store, there.listing.holder)
                found, since_s = there, clock.now()

    def renew(self) -> None:
        """Write the listing anew unless it was written within the last `RENEW_S`. Raises WorkdirTaken."""
        with self._lock:
            if self._clock.now() - self._written_s >= RENEW_S:
                self._write(lambda last: last.next(last.files))

    def publish(self, files: Files) -> Listing:
        """Make these the files of the workdir at once; returns the listing before. Raises WorkdirTaken."""
        with self._lock:
            before = self.listing
            self._write(lambda last: last.next(files))
            return before

    def end(self) -> None:
        """Give the workdir back. Raises WorkdirTaken."""
        with self._lock:
            self._write(lambda last: last.held_by(None))

    def _write(self, change: Callable[[Listing], Listing]) -> None:
        for _ in range(MOST_TURNS):
            wanted = change(self.listing)
            try:
                self._generation = self._store.replace(KEY, packed(wanted), self._generation)
            except Changed:
                there = read(self._store)
                if there.listing != wanted:
                    self._require_own(there)
                    # An earlier request of ours has arrived, though its answer was lost.
                    self.listing, self._generation = there
                    continue
                # It is this request whose answer was lost: an earlier attempt of it has arrived.
                self._generation = there.generation
            self.listing, self._written_s = wanted, self._clock.now()
            return
        raise _refuses(self._store)

    def _require_own(self, there: Found) -> None:
        """Raise WorkdirTaken unless a listing that was not expected is of this holder."""
        end = "Nothing that this process does from now on is kept: end it"
        if there.generation is None:
            raise WorkdirTaken(
                f"{self._store.url}/{KEY}, which says what the workdir holds, was deleted while this process "
                f"wrote to it. {end}. Look for what deletes objects there, such as a rule of the bucket's "
                "life cycle, and use another workdir, or restore that object."
            ) from None
        if there.listing.holder != self._holder:
            other = there.listing.holder
            raise WorkdirTaken(
                f"{self._store.url} was taken by {'another run' if other is None else other.name}, because "
                f"this process had not renewed its hold for {LEASE_S:.0f} s. {end}, and leave the workdir to "
                "the other."
            ) from None
        if there.generation == self._generation:
            raise _refuses(self._store) from None

    def _require_conditions(self) -> None:
        """Raise StoreError if the store replaces an object whichever generation a request names."""
        with self._lock:
            stale = self._generation
            self._write(lambda last: last.next(last.files))
            for generation in (None, stale):
                try:
                    self._generation = self._store.replace(KEY, packed(self.listing), generation)
                except Changed:
                    continue
                raise StoreError(
                    f"{self._store.url} has replaced {KEY} although the request named another generation of "
                    "it: the store ignores the conditions of writes, so that two runs could destroy each "
                    "other's files. Use a store that checks If-Match and If-None-Match, or mount the bucket."
                )


def this_process() -> Holder:
    """Return this process as a holder, different with every call."""
    pid = os.getpid()
    return Holder(
        name=f"process {pid} on {socket.gethostname()}",
        token=uuid.uuid4().hex,
        machine=_machine(),
        pid=pid,
        started=_started(pid) or "",
    )


def has_ended(holder: Holder) -> bool:
    """Return whether a holder is a process of this machine that has ended; False if that is not known."""
    return _runs(holder) is False


def runs_here(holder: Holder) -> bool:
    """Return whether a holder is another process that runs on this machine; False if that is not known.

    This process itself is not asked of the kernel: it may hold a workdir that it could not give back.
    """
    return holder.pid != os.getpid() and _runs(holder) is True


def _runs(holder: Holder) -> bool | None:
    """Return whether a holder is a process that runs on this machine; None if that is not known."""
    if holder.machine == "" or holder.machine != _machine():
        return None
    started = _started(holder.pid)
    if started is None:
        return False
    return None if "" in (started, holder.started) else started == holder.started


def _machine() -> str:
    try:
        boot = (PROC / "sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink(PROC / 'self/ns/pid')}"
    except OSError:  # not Linux
        return ""


def _started(pid: int) -> str | None:
    """Return when a process began, in ticks since the machine did.

    None if it has ended, "" if the kernel does not tell: it may hide the processes of other users.
    """
    try:
        # The name of the program, in brackets, may hold anything. The state follows, and 19 on, the time.
        fields = (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "" if _is_there(pid) else None
    return None if fields[0] in "ZX" else fields[19]


def _is_there(pid: int) -> bool:
    """Return whether there is a process of this number, of any user."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # it is another user's
        pass
    return True


def _refuses(store: ObjectStore) -> StoreError:
    return StoreError(
        f"{store.url} refuses conditional writes: it says that {KEY} has changed, and it has not. Use a "
        "store that checks If-Match and If-None-Match, or mount the bucket."
    )


def _in_use(store: ObjectStore, holder: Holder) -> InUse:
    return InUse(
        f"{store.url} is in use by {holder.name}. Two runs there would delete each other's files: end that "
        "run first, or use another workdir."
    )


def _require_unused(store: ObjectStore) -> None:
    """Raise StoreError if a workdir without a listing has objects where its pieces are to be."""
    found = next(store.keys(PIECES), None)
    if found is not None and read(store).generation is None:  # else another run has begun just now
        raise StoreError(
            f"{store.url} has no {KEY}, but {store.url}/{found} lies where a run would write. Name another "
            f"workdir. If these are leftovers of a run whose {KEY} was deleted, restore that file or delete "
            f"all that is below {store.url}/{PIECES}."
        )
