"""Libraries for buckets are not loaded by runs that use none, and work for whoever uses them."""

import subprocess
import sys

PROGRAM = """
import sys
import jaxgoodput.observe.dashboard.eventfile
from tensorboardX import record_writer

assert record_writer.S3_ENABLED and record_writer.GCS_ENABLED
loaded = {"boto3", "botocore", "google.cloud.storage", "requests"} & {*sys.modules}
assert not loaded, loaded

from google.cloud import storage
from google.cloud.storage.exceptions import DataCorruption
import boto3

assert record_writer.boto3.client is boto3.client
assert record_writer.storage.Client is storage.Client
assert type(boto3) is type(sys) is type(storage)
"""


def test_tensorboardx_has_its_libraries_once_it_needs_them():
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", PROGRAM], capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
