"""`BucketKeeper`: copies what a run writes into the bucket that its workdir is, on a thread of its own."""

import pathlib
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from absl import logging

from jaxgoodput._disk import InUse
from jaxgoodput._worker import Worker
from jaxgoodput.workdir.copies import (
    LARGE,
    NUM_AT_ONCE,
    Stamp,
    Upload,
    download,
    warn_of_damage,
)
from jaxgoodput.workdir.listing import PIECE, PIECES
from jaxgoodput.workdir.objects import ObjectStore, StoreError
from jaxgoodput.workdir.tenure import RENEW_S, Tenure, WorkdirTaken

COPY_S = 5.0  # longest time until what was written is copied


class BucketKeeper:
    """Fetches the files of a workdir that is held into `folder`, and copies changes back. See `Keeper`.

    Large files of checkpoints are fetched when they are wanted. Copying goes on until `close`, which ends the
    tenure. If another process takes the workdir, `on_lost` is called with a sentence, once.
    """

    def __init__(
        self,
        folder: pathlib.Path,
        store: ObjectStore,
        tenure: Tenure,
        on_lost: Callable[[str], None],
    ):
        self._folder = folder.resolve()
        self._store = store
        self._on_lost = on_lost
        self._tenure = tenure
        self.is_complete = False
        """Whether `close` has copied everything."""
        self._news = threading.Condition()
        self._num_asked = self._num_done = (
            0  # calls of `secure`, and those that the last copy answers
        )
        self._error: str | None = None  # of the last copy
        self._is_store_away = False  # whether that was for want of the store
        self._damaged: frozenset[str] = frozenset()  # see `Upload.damaged`
        self._lost: str | None = None  # why nothing can be copied any more
        self._is_taken = False  # whether that is because another process has the workdir
        self._has_ended = False  # whether nothing is copied any more
        self._copying = threading.Lock()  # nothing is copied in both directions at once
        self._renewer = Worker("renew", self._renew, on_error=self._broken)
        try:
            known = self._fetch(lambda path: not LARGE.fullmatch(path))
            self._upload = Upload(self._folder, store, known)
            self._remove_leftovers()
        except BaseException:
            self._give_back()
            raise
        self._copier = Worker("copy", self._copy, on_error=self._broken)

    def secure(self) -> str | None:
        """Return when all that was written before is in the bucket: None, or why it is not."""
        with self._news:
            self._num_asked += 1
            number = self._num_asked
            self._news.notify_all()
            self._news.wait_for(lambda: self._num_done >= number or self._has_ended)
            if self._lost is None and self._num_done < number:
                return f"{self._store.url} was given back already"
            return self._lost or self._error

    @property
    def unreachable(self) -> str | None:
        """Why the store could not be used by the last copy; None if it could. It is tried again soon."""
        return self._lost or (self._error if self._is_store_away else None)

    def is_safe(self, folder: pathlib.Path) -> bool:
        """Return whether the checkpoint in a folder, as it is now, is in the bucket.

        If the folder is gone, return whether the bucket still has the checkpoint.
        """
        within = f"{folder.relative_to(self._folder).as_posix()}/"
        is_listed = any(path.startswith(within) for path in self._tenure.listing.files)
        return is_listed and self._upload.is_settled(folder)

    def bring(self, folder: pathlib.Path) -> None:
        """Have all files of a checkpoint in its folder, as far as they are there. Raises StoreError."""
        within = f"{folder.relative_to(self._folder).as_posix()}/"
        with self._copying:
            self._upload.add(
                self._fetch(lambda path: path.startswith(within) and self._is_away(path))
            )

    def close(self) -> None:
        """Copy the rest, and give the workdir back; if that fails, a warning says what is missing."""
        try:
            error = self.secure()
            self.is_complete = error is None
            self._tell_what_is_missing(error)
        finally:
            try:
                self._stop_copying()
            finally:
                self._give_back()

    def _tell_what_is_missing(self, error: str | None) -> None:
        if error is not None:
            logging.warning(
                "the last files of the run are not in %s (%s). They stay in %s until another run of this "
                "workdir begins on this machine.",
                *(self._store.url, error, self._folder),
            )

    def _stop_copying(self) -> None:
        self._copier.stop()
        with self._news:
            self._has_ended = True
            self._news.notify_all()
        self._copier.join()

    # -- on the threads ------------------------------------------------------------------------------

    def _copy(self, worker: Worker) -> None:
        while not worker.is_stopping:
            with self._news:
                self._news.wait_for(
                    lambda: worker.is_stopping or self._num_asked > self._num_done, COPY_S
                )
                number = self._num_asked
            with self._copying:
                failure = self._copied()
            with self._news:
                error = None if failure is None else f"{type(failure).__name__}: {failure}"
                self._num_done, self._error = number, error
                self._is_store_away = isinstance(failure, StoreError)
                self._news.notify_all()

    def _copied(self) -> OSError | None:
        """Copy what has changed; returns what went wrong. Raises WorkdirTaken."""
        try:
            before = self._tenure.listing
            files = self._upload(before)
            self._tell_of_damage()
            if files == before.files:
                self._upload.settle()
                return None
            replaced = self._tenure.publish(files)
            self._upload.settle()
            self._delete(replaced.keys - self._tenure.listing.keys)
        except OSError as failure:
            if self._error is None:
                logging.warning(
                    "files of the run could not be copied to %s (%s: %s). Training goes on, and they are "
                    "copied when that is possible again.",
                    *(self._store.url, type(failure).__name__, failure),
                )
            return failure
        return None

    def _tell_of_damage(self) -> None:
        """Log, once, that files of a checkpoint have vanished here."""
        for folder in sorted(self._upload.damaged - self._damaged):
            logging.error(
                "files have vanished from %s. The whole checkpoint stays in %s. Look for what deletes old "
                "files on this machine, and have it spare that folder.",
                *(self._folder / folder, self._store.url),
            )
        self._damaged = self._upload.damaged

    def _renew(self, worker: Worker) -> None:
        while not worker.wait_stopping(RENEW_S / 5):
            try:
                self._tenure.renew()
            except (
                StoreError
            ) as error:  # what cannot be renewed may still be, before anyone else takes it
                logging.info("the hold of %s could not be renewed: %s", self._store.url, error)

    def _broken(self, failure: BaseException) -> None:
        """Stop the run: another process has the workdir, or copying has failed in an unforeseen way."""
        with self._news:
            is_first = self._lost is None
            self._is_taken = isinstance(failure, WorkdirTaken)
            self._lost = str(failure) if isinstance(failure, WorkdirTaken) else repr(failure)
            self._has_ended = True
            self._news.notify_all()
        if is_first:
            logging.error("%s", self._lost)
            self._on_lost(self._lost)

    # -- parts ---------------------------------------------------------------------------------------

    def _fetch(self, wanted: Callable[[str], bool]) -> dict[str, Stamp]:
        files = self._tenure.listing.files
        return download(self._folder, self._store, files, wanted, on_damage=warn_of_damage)

    def _is_away(self, path: str) -> bool:
        return not (self._folder / path).exists()

    def _remove_leftovers(self) -> None:
        """Delete pieces of runs that were killed before they could publish or delete them."""
        named = self._tenure.listing.keys
        self._delete({key for key in self._store.keys(PIECES) if key not in named})

    def _delete(self, keys: set[str]) -> None:
        own = sorted(key for key in keys if PIECE.fullmatch(key))
        try:
            with ThreadPoolExecutor(NUM_AT_ONCE) as pool:
                list(pool.map(self._store.delete, own))
        except StoreError as error:
            logging.info(
                "objects that are not used any more stay in %s: %s", self._store.url, error
            )

    def _give_back(self) -> None:
        self._renewer.close()
        if self._is_taken:
            return
        try:
            self._tenure.end()
        except (StoreError, InUse) as error:
            logging.warning(
                "%s could not be given back (%s): the next run waits until this one's hold has run out.",
                *(self._store.url, error),
            )
