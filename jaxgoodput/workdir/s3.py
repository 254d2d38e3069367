"""S3, and stores that speak its protocol, as an `ObjectStore`, by boto3 (`pip install 'jaxgoodput[s3]'`).

Credentials, region and endpoint are found as boto3 finds them: its files and variables such as AWS_PROFILE,
and AWS_ENDPOINT_URL for a store of another maker or an emulator.
"""

import base64
import contextlib
import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import boto3
from botocore.config import Config
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    FlexibleChecksumError,
    HTTPClientError,
    IncompleteReadError,
    NoCredentialsError,
    NoRegionError,
)
from botocore.exceptions import (
    ConnectionError as NoConnection,
)

from jaxgoodput.workdir.objects import (
    CONNECT_S,
    REQUEST_S,
    Changed,
    StoredObject,
    StoreError,
    Unavailable,
)

# Codes that ask to try again, beside all with a status of 500 and above. The store had received something
# else than was sent (BadDigest), or another conditional write was in progress.
LATER = ("BadDigest", "ConditionalRequestConflict", "RequestTimeout", "SlowDown", "Throttling")
MISSING = ("NoSuchKey", "404")


class S3Store:
    """The objects below a prefix of a bucket of S3. See `ObjectStore`."""

    def __init__(self, bucket: str, prefix: str):
        self.url = f"s3://{bucket}/{prefix}".rstrip("/")
        self._bucket = bucket
        self._prefix = f"{prefix}/" if prefix else ""
        settings = Config(
            connect_timeout=CONNECT_S,
            read_timeout=REQUEST_S,
            retries={"mode": "standard", "total_max_attempts": 1},
        )
        try:
            self._client = boto3.client("s3", config=settings)
        except NoRegionError as error:
            raise StoreError(
                f"no region is set for {self.url}: set AWS_DEFAULT_REGION to the bucket's."
            ) from error

    def get(self, key: str) -> StoredObject | None:
        """Return an object; None if there is none. Raises StoreError if there is no bucket."""
        try:
            with self._telling(f"read {key}"):
                found = self._client.get_object(**self._at(key), ChecksumMode="ENABLED")
                return StoredObject(found["Body"].read(), found["ETag"])
        except ClientError as error:
            if _code(error) in MISSING:
                return None
            raise

    def put(self, key: str, data: bytes) -> None:
        """Write an object; the store checks its SHA-256, and returns it."""
        self._write(key, data, {})

    def replace(self, key: str, data: bytes, generation: str | None) -> str:
        """Write an object if it still is of this generation; returns the new one."""
        condition = {"IfNoneMatch": "*"} if generation is None else {"IfMatch": generation}
        try:
            return self._write(key, data, condition)
        except ClientError as error:  # what was to be replaced may be gone
            raise Changed(f"{self.url}/{key}") from error

    def keys(self, below: str) -> Iterator[str]:
        """Return the keys that begin with `below`."""
        with self._telling(f"list {below}"):
            pages = self._client.get_paginator("list_objects_v2").paginate(
                Bucket=self._bucket, Prefix=self._prefix + below
            )
            names = [found["Key"] for page in pages for found in page.get("Contents", ())]
        return (name.removeprefix(self._prefix) for name in names)

    def delete(self, key: str) -> None:
        """Delete an object, if there is one."""
        with self._telling(f"delete {key}"):
            self._client.delete_object(**self._at(key))

    def _at(self, key: str) -> dict[str, str]:
        return {"Bucket": self._bucket, "Key": self._prefix + key}

    def _write(self, key: str, data: bytes, condition: Mapping[str, Any]) -> str:
        own = base64.b64encode(hashlib.sha256(data).digest()).decode()
        with self._telling(f"write {key}"):
            done = self._client.put_object(
                **self._at(key),
                Body=data,
                ChecksumAlgorithm="SHA256",
                ChecksumSHA256=own,
                **condition,
            )
        stored = done.get("ChecksumSHA256")
        if stored is None:
            raise StoreError(
                f"{self.url} returned no checksum of what it has stored, so that the run cannot know whether "
                "its files are safe. Use a store that supports x-amz-checksum-sha256, or mount the bucket."
            )
        if stored != own:
            raise Unavailable(
                f"{self.url}/{key} was changed on its way: the store has SHA-256 {stored}, not {own}."
            )
        return done["ETag"]

    @contextlib.contextmanager
    def _telling(self, what: str) -> Iterator[None]:
        """Turn errors of the client into ours; a missing object and a failed condition stay as they are."""
        try:
            yield
        except ClientError as error:
            code = _code(error)
            status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
            if code in MISSING or status == 412:
                raise
            if code == "NoSuchBucket":
                raise StoreError(
                    f"there is no bucket {self._bucket!r} at this endpoint of S3. Create it, name another "
                    "one in the workdir, or set AWS_ENDPOINT_URL to the store that has it."
                ) from error
            if status >= 500 or status == 429 or code in LATER:
                raise Unavailable(f"{self.url} could not {what}: {error}") from error
            raise StoreError(
                f"{self.url} refused to {what}: {error}. The run needs s3:GetObject, s3:PutObject, "
                "s3:DeleteObject and s3:ListBucket there."
            ) from error
        except NoCredentialsError as error:
            raise StoreError(
                f"there are no credentials for {self.url}. Run `aws configure`, or set AWS_PROFILE, or "
                "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY."
            ) from error
        # All others of this kind are of a connection that failed or broke off, or of a wrong setting.
        except (
            HTTPClientError,
            NoConnection,
            IncompleteReadError,
            FlexibleChecksumError,
        ) as error:
            raise Unavailable(f"{self.url} could not {what}: {error}") from error
        except BotoCoreError as error:
            raise StoreError(f"{self.url} could not {what}: {error}") from error


def _code(error: ClientError) -> str:
    return str(error.response.get("Error", {}).get("Code", ""))
