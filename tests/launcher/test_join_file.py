"""The file by which hosts find a job: readable for its owner only, there while the job runs, never half."""

import json
import pathlib
import signal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_elastic import Cluster

from jaxgoodput.launcher.join_file import (
    JoinDetails,
    join_file_there,
    read_join_file,
    write_join_file,
)
from jaxgoodput.launcher.supervise import UsageError

DETAILS = JoinDetails("127.0.0.1:29400", "a secret of these tests")


def test_it_is_there_inside_the_block_for_its_owner_only(tmp_path):
    path = tmp_path / "new folder" / "job"
    with join_file_there(path, DETAILS):
        assert read_join_file(path) == DETAILS
        assert path.stat().st_mode & 0o77 == 0 and path.parent.stat().st_mode & 0o77 == 0
        assert [one.name for one in path.parent.iterdir()] == ["job"]
    assert not list(path.parent.iterdir())
    assert "a secret" not in repr(DETAILS)


def test_a_file_that_another_job_has_written_since_stays(tmp_path, capfd):
    other = JoinDetails("127.0.0.1:29401", "another secret")
    with join_file_there(tmp_path / "job", DETAILS):
        write_join_file(tmp_path / "job", other)
    assert read_join_file(tmp_path / "job") == other
    with join_file_there(tmp_path / "job", DETAILS):
        (tmp_path / "job").write_text("edited")
    assert "was not removed" in capfd.readouterr().err


@pytest.mark.parametrize("name", ["", "a/b", "nul\0"])
def test_what_cannot_be_written_is_a_usage_error(name, tmp_path):
    (tmp_path / "a").touch()
    with pytest.raises(UsageError, match="--join-file .* cannot be written"):
        with join_file_there(pathlib.Path(f"{tmp_path}/{name}"), DETAILS):
            pass


GOOD = json.dumps({"address": "a:1", "secret": "s"}).encode()


@given(
    st.binary(max_size=80)
    | st.integers(0, len(GOOD) - 1).map(lambda i: GOOD[:i])
    | st.sampled_from(
        [b"[]", b"{}", b'{"address": 1, "secret": 2}', b'{"address": "a", "secret": "b", "x": 1}']
    )
)
def test_anything_else_is_refused(tmp_path_factory, data):
    path = tmp_path_factory.getbasetemp() / "join file with anything"
    path.write_bytes(data)
    with pytest.raises(ValueError, match="join file with anything"):
        read_join_file(path)


@pytest.mark.multihost
@pytest.mark.slow
def test_a_host_that_waits_for_the_file_joins_with_its_address_and_secret(tmp_path):
    """A file of an earlier job is there first; the agent tries until the new one is."""
    path = tmp_path / "job.join"
    write_join_file(path, JoinDetails("127.0.0.1:9", "of a job that has ended"))
    nodes, options = "1:2", ("--join-file", str(path), "--join-s", "60", "--admit-every-s", "1")
    with Cluster(
        tmp_path / "job", epochs=150, step_s=0.05, nodes=nodes, options=options
    ) as cluster:
        cluster.agent("a")
        cluster.wait_for_processes(1)
        cluster.environ = {"JAXGOODPUT_SECRET": "not of this job"}
        cluster.agents["b"] = cluster.start("agent", "--name", "b", "--join-file", str(path))
        cluster.wait_for_processes(2)
        cluster.agents["b"].send(signal.SIGTERM)
        assert cluster.agents["b"].wait().code == 143
        cluster.wait_for_processes(1)
        cluster.hurry()
        cluster.finish()
    assert not path.exists()
