"""Google Cloud Storage as an `ObjectStore`, by Google's own client (`pip install 'jaxgoodput[gcs]'`).

Credentials and the endpoint are found as that client finds them: application default credentials, and
STORAGE_EMULATOR_HOST for an emulator.
"""

import base64
import contextlib
import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import requests
from google.api_core.exceptions import GoogleAPICallError, NotFound, PreconditionFailed
from google.auth.exceptions import DefaultCredentialsError, GoogleAuthError
from google.cloud import storage
from google.cloud.storage.exceptions import DataCorruption, InvalidResponse

from jaxgoodput.workdir.objects import (
    CONNECT_S,
    REQUEST_S,
    Changed,
    StoredObject,
    StoreError,
    Unavailable,
)

# Of every request: it is made once, see `PatientStore`.
ONCE: Mapping[str, Any] = {"retry": None, "timeout": (CONNECT_S, REQUEST_S)}
# The first number also limits how long it may take to send what the client hands over at once: of a large
# object a part, so that a slow link can write it. The listing, which renews the hold, is small.
SENDING: Mapping[str, Any] = {**ONCE, "timeout": (REQUEST_S, REQUEST_S)}
PART_BYTES = 2 * 2**20  # a multiple of 256 KiB
# Codes that ask to try again, beside those of 500 and above.
LATER = (408, 429)


class GcsStore:
    """The objects below a prefix of a bucket of Google Cloud Storage. See `ObjectStore`."""

    def __init__(self, bucket: str, prefix: str):
        self.url = f"gs://{bucket}/{prefix}".rstrip("/")
        self._prefix = f"{prefix}/" if prefix else ""
        try:
            self._client = storage.Client()
        except DefaultCredentialsError as error:
            raise StoreError(
                f"there are no credentials for {self.url}. Run `gcloud auth application-default login`, or "
                "set GOOGLE_APPLICATION_CREDENTIALS to the file of a service account."
            ) from error
        self._bucket = self._client.bucket(bucket)

    def get(self, key: str) -> StoredObject | None:
        """Return an object; None if there is none. Raises StoreError if there is no bucket."""
        blob = self._bucket.blob(self._prefix + key)
        try:
            with self._telling(f"read {key}"):
                data = blob.download_as_bytes(**ONCE)
        except NotFound:
            self._listed(key, limit=1)  # raises if there is no bucket
            return None
        return StoredObject(data, str(blob.generation))

    def put(self, key: str, data: bytes) -> None:
        """Write an object; the store checks its CRC, and returns the MD5 of what it has stored."""
        self._write(key, data, None, SENDING)

    def replace(self, key: str, data: bytes, generation: str | None) -> str:
        """Write an object if it still is of this generation; returns the new one."""
        return self._write(key, data, 0 if generation is None else int(generation), ONCE)

    def keys(self, below: str) -> Iterator[str]:
        """Return the keys that begin with `below`."""
        return iter(self._listed(below))

    def delete(self, key: str) -> None:
        """Delete an object, if there is one."""
        with contextlib.suppress(NotFound), self._telling(f"delete {key}"):
            self._bucket.blob(self._prefix + key).delete(**ONCE)

    def _write(
        self, key: str, data: bytes, generation: int | None, limits: Mapping[str, Any]
    ) -> str:
        blob = self._bucket.blob(self._prefix + key, chunk_size=PART_BYTES)
        try:
            with self._telling(f"write {key}"):
                blob.upload_from_string(
                    data,
                    content_type="application/octet-stream",
                    if_generation_match=generation,
                    checksum="crc32c",
                    **limits,
                )
        except PreconditionFailed as error:
            raise Changed(f"{self.url}/{key}") from error
        except NotFound as error:
            raise self._no_bucket() from error
        own = base64.b64encode(hashlib.md5(data, usedforsecurity=False).digest()).decode()
        if blob.md5_hash != own:
            raise Unavailable(
                f"{self.url}/{key} was changed on its way: the store has MD5 {blob.md5_hash}, not {own}."
            )
        return str(blob.generation)

    def _listed(self, below: str, limit: int | None = None) -> list[str]:
        try:
            with self._telling(f"list {below}"):
                blobs = self._client.list_blobs(
                    self._bucket,
                    prefix=self._prefix + below,
                    max_results=limit,
                    **ONCE,
                )
                return [blob.name.removeprefix(self._prefix) for blob in blobs]
        except NotFound as error:
            raise self._no_bucket() from error

    def _no_bucket(self) -> StoreError:
        return StoreError(
            f"there is no bucket {self._bucket.name!r} of Google Cloud Storage, or these credentials may not "
            "see it. Create it, or name another one in the workdir."
        )

    @contextlib.contextmanager
    def _telling(self, what: str) -> Iterator[None]:
        """Turn errors of the client into ours; a missing object and a failed condition stay as they are."""
        try:
            yield
        except (NotFound, PreconditionFailed):
            raise
        except GoogleAPICallError as error:
            code = int(error.code or 0)
            if code >= 500 or code in LATER:
                raise Unavailable(f"{self.url} could not {what}: {error}") from error
            raise StoreError(
                f"{self.url} refused to {what}: {error}. The run reads, writes, lists and deletes objects "
                "there: give its account the role storage.objectUser."
            ) from error
        # The client passes on what `requests` raises in some places, and wraps it in others.
        except (
            requests.RequestException,
            ConnectionError,
            DataCorruption,
            InvalidResponse,
        ) as error:
            raise Unavailable(
                f"{self.url} could not {what}: {type(error).__name__}: {error}"
            ) from error
        except GoogleAuthError as error:
            raise Unavailable(
                f"{self.url} could not {what}, for lack of a token: {error}"
            ) from error
