"""The Kubernetes API over HTTP, with the standard library alone: requests, lists and watches."""

import contextlib
import http.client
import json
import pathlib
import ssl
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode, urlsplit

URL = "https://kubernetes.default.svc"  # of the API, for pods
CREDENTIALS = pathlib.Path("/var/run/secrets/kubernetes.io/serviceaccount")  # of a pod
TIMEOUT_S = 30.0
WATCH_S = 20  # a watch ends after this time, and the next one begins
GONE, CONFLICT, NOT_FOUND, INVALID, FORBIDDEN = 410, 409, 404, 422, 403

_MERGE = "application/merge-patch+json"


class ApiUnreachable(OSError):
    """The Kubernetes API does not answer, or not now."""


class ApiRefused(Exception):
    """The Kubernetes API refused a request. The message is its own."""

    def __init__(self, status: int, message: str):
        self.status = status
        super().__init__(message)


@dataclass(frozen=True, kw_only=True)
class ApiAccess:
    """Where the Kubernetes API is, and the folder of the files by which it knows this pod.

    Raises ValueError if the files are missing.
    """

    url: str = URL
    credentials: pathlib.Path = CREDENTIALS
    """Kubernetes renews the file `token`, so it is read for each request."""

    def __post_init__(self):
        if urlsplit(self.url).scheme not in ("http", "https"):
            raise ValueError(f"--api {self.url}: expected http://HOST:PORT or https://HOST:PORT.")
        if not (self.credentials / "token").is_file():
            raise ValueError(
                f"there is no file {self.credentials}/token, by which Kubernetes knows a pod. Run this in a "
                "pod with a service account, as the manifests of `jaxgoodput manifests --jobs pods` do."
            )

    @property
    def namespace(self) -> str:
        """The namespace of this pod."""
        return (self.credentials / "namespace").read_text().strip()

    def connect(self, timeout_s: float) -> http.client.HTTPConnection:
        """Return a new connection; it is opened by the first request."""
        parts = urlsplit(self.url)
        assert parts.hostname is not None  # checked above
        if parts.scheme == "http":
            return http.client.HTTPConnection(parts.hostname, parts.port, timeout=timeout_s)
        context = ssl.create_default_context(cafile=str(self.credentials / "ca.crt"))
        return http.client.HTTPSConnection(
            parts.hostname, parts.port, timeout=timeout_s, context=context
        )

    @property
    def headers(self) -> dict[str, str]:
        """The headers of each request."""
        token = (self.credentials / "token").read_text().strip()
        return {"Authorization": f"Bearer {token}", "Accept": "application/json"}


class KubernetesApi:
    """Requests to the Kubernetes API. Thread-safe: each request has its own connection.

    All methods raise ApiUnreachable if there is no whole answer, and ApiRefused with the status otherwise.
    """

    def __init__(self, access: ApiAccess):
        self._access = access

    def get(self, path: str, **query: str) -> dict[str, Any]:
        """Return an object, or a list of objects."""
        return self._call("GET", _with_query(path, query))

    def create(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Create an object in a collection; return it as it was stored."""
        return self._call("POST", path, body)

    def patch(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Change some fields of an object with a merge patch; return it as it was stored."""
        return self._call("PATCH", path, body, kind=_MERGE)

    def delete(self, path: str, uid: str) -> dict[str, Any]:
        """Delete the object with this `uid`. It is there until all objects that it owns are gone."""
        options = {"propagationPolicy": "Foreground", "preconditions": {"uid": uid}}
        return self._call("DELETE", path, {"apiVersion": "v1", "kind": "DeleteOptions", **options})

    def watch(self, path: str, version: str, **query: str) -> Iterator[Mapping[str, Any]]:
        """Yield the events after a version of a list, until the API ends the watch.

        Raises ApiRefused with status GONE if the API no longer knows what happened since that version: the
        caller has to list the objects again.
        """
        query |= {"watch": "true", "resourceVersion": version, "timeoutSeconds": str(WATCH_S)}
        target = _with_query(path, {**query, "allowWatchBookmarks": "true"})
        with contextlib.closing(self._access.connect(WATCH_S + TIMEOUT_S)) as connection:
            try:
                connection.request("GET", target, headers=self._access.headers)
                response = connection.getresponse()
                if response.status >= 400:
                    raise _refusal(response.status, response.read())
                while line := response.readline():
                    event = json.loads(line)
                    if event["type"] == "ERROR":
                        raise _refusal(
                            event["object"].get("code", 500), json.dumps(event["object"])
                        )
                    yield event
            except (OSError, http.client.HTTPException, ValueError) as error:
                raise ApiUnreachable(f"the watch of {path} has ended: {error}") from None

    def _call(
        self,
        method: str,
        target: str,
        body: Mapping[str, Any] | None = None,
        kind: str = "application/json",
    ) -> dict[str, Any]:
        data = None if body is None else json.dumps(body)
        with contextlib.closing(self._access.connect(TIMEOUT_S)) as connection:
            try:
                headers = self._access.headers | ({} if body is None else {"Content-Type": kind})
                connection.request(method, target, data, headers)
                response = connection.getresponse()
                text = response.read()
                if response.status >= 400:
                    raise _refusal(response.status, text)
                return json.loads(text)
            except (OSError, http.client.HTTPException, ValueError) as error:
                raise ApiUnreachable(
                    f"the Kubernetes API does not answer at {self._access.url}: {error}"
                ) from None


def _with_query(path: str, query: Mapping[str, str]) -> str:
    return f"{path}?{urlencode(query)}" if query else path


def _refusal(status: int, text: bytes | str) -> ApiRefused | ApiUnreachable:
    """Return the exception for an answer that is an error. Statuses that pass are no refusals."""
    try:
        said = json.loads(text)["message"]
    except (ValueError, KeyError, TypeError):
        said = f"status {status}"
    if status == 429 or (status >= 500):
        return ApiUnreachable(f"the Kubernetes API cannot answer now: {said}")
    return ApiRefused(status, said)
