"""A copy of the objects of one kind, kept current by a list and a watch of the Kubernetes API."""

import threading
from collections.abc import Callable, Mapping
from typing import Any

from absl import logging

from jaxgoodput._worker import Worker
from jaxgoodput.cluster.service.kubernetes.api import (
    GONE,
    ApiRefused,
    ApiUnreachable,
    KubernetesApi,
)

AGAIN_S = 1.0


class ObjectCopy:
    """The objects of a collection that have certain labels, by name. Thread-safe.

    `run` is for a worker of its own. It lists the objects once and then follows their changes. If the API
    forgets what happened since the last one, as after a long break, it lists them again. `changed` is called
    after every change.
    """

    def __init__(self, api: KubernetesApi, path: str, labels: str, changed: Callable[[], None]):
        self._api, self._path, self._labels, self._changed = api, path, labels, changed
        self._objects: dict[str, Mapping[str, Any]] | None = None
        self._version = ""
        self._lock = threading.Lock()

    def objects(self) -> Mapping[str, Mapping[str, Any]] | None:
        """Return all objects by name; None before the first list."""
        with self._lock:
            return None if self._objects is None else dict(self._objects)

    def put(self, one: Mapping[str, Any]) -> None:
        """Note an object as the API has just answered it, before the watch tells of it.

        An answer is left out if the watch has told of a later state, or that the object is gone.
        """
        about = one.get("metadata", {})
        if "name" not in about:
            return
        with self._lock:
            if self._objects is None:
                return
            known = self._objects.get(about["name"])
            if known is None and "deletionTimestamp" in about:
                return
            is_same = known is not None and known["metadata"]["uid"] == about["uid"]
            if known is not None and is_same and _version(known) >= _version(one):
                return
            self._objects[about["name"]] = one

    def remove(self, name: str) -> None:
        """Note that the API has just said that there is no such object."""
        with self._lock:
            if self._objects is not None:
                self._objects.pop(name, None)

    def run(self, worker: Worker) -> None:
        """Keep the copy current until the worker is asked to end."""
        is_listed, is_away = False, False
        while not worker.is_stopping:
            try:
                if not is_listed:
                    self._list()
                    is_listed = True
                if is_away:
                    logging.warning("the Kubernetes API answers again")
                    is_away = False
                self._watch(worker)
                continue
            except ApiUnreachable as error:
                if not is_away:
                    logging.warning("%s. It is tried again; pods go on meanwhile.", error)
                is_away = True
            except ApiRefused as error:
                is_listed = False
                if error.status != GONE:
                    logging.error("%s: the Kubernetes API refuses a list: %s", self._path, error)
            worker.wait_stopping(AGAIN_S)

    def _list(self) -> None:
        found = self._api.get(self._path, labelSelector=self._labels)
        # The items of a list do not say of which kind they are.
        kind = {"kind": found["kind"].removesuffix("List"), "apiVersion": found["apiVersion"]}
        with self._lock:
            self._objects = {one["metadata"]["name"]: kind | one for one in found["items"]}
            self._version = found["metadata"]["resourceVersion"]
        self._changed()

    def _watch(self, worker: Worker) -> None:
        for event in self._api.watch(self._path, self._version, labelSelector=self._labels):
            one = event["object"]
            with self._lock:
                assert self._objects is not None  # it was listed before
                self._version = one["metadata"]["resourceVersion"]
                if event["type"] == "DELETED":
                    self._objects.pop(one["metadata"]["name"], None)
                elif event["type"] != "BOOKMARK":
                    self._objects[one["metadata"]["name"]] = one
            self._changed()
            if worker.is_stopping:
                return


def _version(one: Mapping[str, Any]) -> int:
    """Return the number of an object's state: since Kubernetes 1.35 by contract, before in practice."""
    return int(one["metadata"]["resourceVersion"])
