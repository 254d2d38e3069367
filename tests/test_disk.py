"""A folder with its sums is what was written, or what is wrong is named; a folder is held by one process."""

import pathlib
import shutil
import subprocess
import sys
import tempfile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxgoodput import _disk

names = st.sampled_from(["state/d/one", "state/d/two", "state/manifest", "meta/metadata"])
contents = st.dictionaries(names, st.binary(min_size=1, max_size=40), min_size=1)


def written(folder, files):
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    (folder / "of the top").write_text("changes later")
    _disk.seal(folder)


@st.composite
def damages(draw):
    """Files, one of them, and what became of it; None: it is gone."""
    files = draw(contents)
    name = draw(st.sampled_from(sorted(files)))
    before = files[name]
    flipped = bytearray(before)
    bit = draw(st.integers(0, 8 * len(before) - 1))
    flipped[bit // 8] ^= 1 << bit % 8
    cut, longer, zeroed = before[: bit // 8], before + b"\0", bytes(len(before))
    return files, name, draw(st.sampled_from([None, bytes(flipped), cut, longer, zeroed, b""]))


@pytest.mark.slow
@given(damage=damages(), num_shares=st.integers(1, 3))
def test_whatever_becomes_of_a_file_is_named_by_one_of_its_readers(damage, num_shares):
    files, name, after = damage
    with tempfile.TemporaryDirectory() as path:
        folder = pathlib.Path(path)
        written(folder, files)
        (folder / "of the top").write_text("changed")
        for share in range(num_shares):
            _disk.check(folder, share=share, num_shares=num_shares)
        if after == files[name]:
            return
        (folder / name).unlink()
        if after is not None:
            (folder / name).write_bytes(after)
        told = []
        for share in range(num_shares):
            try:
                _disk.check(folder, share=share, num_shares=num_shares)
            except _disk.DamagedError as found:
                told.append(str(found))
        assert told and all(name in sentence for sentence in told)
        assert len(told) == (num_shares if after is None else 1)


@pytest.mark.slow
@given(files=contents, data=st.data())
def test_sums_that_were_changed_are_damage_like_any_other(files, data):
    with tempfile.TemporaryDirectory() as path:
        folder = pathlib.Path(path)
        written(folder, files)
        sums = bytearray((folder / _disk.SUMS).read_bytes())
        bit = data.draw(st.integers(0, 8 * len(sums) - 9))  # but of the last line's end
        sums[bit // 8] ^= 1 << bit % 8
        (folder / _disk.SUMS).write_bytes(sums)
        with pytest.raises(_disk.DamagedError):
            _disk.check(folder)
        (folder / _disk.SUMS).write_bytes(b"")
        with pytest.raises(_disk.DamagedError, match=f"is not in {_disk.SUMS}"):
            _disk.check(folder)


def test_a_file_that_was_not_there_is_damage_and_many_are_counted(tmp_path):
    written(tmp_path, {"state/one": b"1"})
    for i in range(5):
        (tmp_path / "state" / f"new{i}").write_bytes(b"")
    with pytest.raises(_disk.DamagedError, match="new0 is not in sha256sums, .*, and 2 more"):
        _disk.check(tmp_path)


@pytest.mark.skipif(shutil.which("sha256sum") is None, reason="sha256sum is not installed")
def test_sha256sum_reads_the_sums(tmp_path):
    written(tmp_path, {"state/d/one": b"1" * 10**6, "meta/metadata": b"{}"})
    command = ["sha256sum", "--check", "--strict", "--quiet", _disk.SUMS]
    assert subprocess.run(command, cwd=tmp_path).returncode == 0
    (tmp_path / "meta/metadata").write_bytes(b"[]")
    assert subprocess.run(command, cwd=tmp_path, capture_output=True).returncode == 1


HOLDER = """
    import pathlib, sys
    from jaxgoodput import _disk
    with _disk.held(pathlib.Path(sys.argv[1])):
        print("held", flush=True)
        sys.stdin.read()
"""


def test_a_folder_is_held_by_one_process_until_it_ends_in_whatever_way(tmp_path):
    command = [sys.executable, "-c", HOLDER.replace("\n    ", "\n"), str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None and other.stdout.readline() == b"held\n"
        with pytest.raises(_disk.InUse, match=f"in use by process {other.pid} on ") as refused:
            with _disk.held(tmp_path):
                raise AssertionError("two hold it")
        assert "use another folder" in str(refused.value)
        other.kill()
        other.wait()
        with _disk.held(tmp_path):
            pass
    with _disk.held(tmp_path):
        pass
