"""A bucket holds what a folder held at some moment, whatever fails; what was published stays whole."""

import pathlib
import shutil

import buckets
import pytest
from buckets import checkpoint, write
from hypothesis import given
from hypothesis import strategies as st

from jaxgoodput._disk import DamagedError
from jaxgoodput.workdir import copies
from jaxgoodput.workdir.copies import Upload, download, stamps
from jaxgoodput.workdir.listing import KEY, Listing, StoredPiece, content, packed, stay
from jaxgoodput.workdir.objects import Unavailable
from jaxgoodput.workdir.viewing import BucketView


def contents(folder: pathlib.Path) -> dict[str, bytes]:
    return {path: (folder / path).read_bytes() for path in stamps(folder)}


def in_bucket(store, listing) -> dict[str, bytes]:
    """What the files of a listing hold; each piece must be there and right."""
    return {
        path: b"".join(content(store, piece) for piece in pieces)
        for path, pieces in listing.files.items()
    }


CHANGES = {
    "lines": lambda folder, n: write(folder, "goodput.jsonl", b"line %d\n" % n, "ab"),
    "curves": lambda folder, n: write(folder, "tensorboard/a/events.1", b"%d" % n * 9, "ab"),
    "settings": lambda folder, n: write(folder, "config.json", b"%d" % n),
    "empty": lambda folder, n: write(folder, "scalars.csv", b""),
    "save": lambda folder, n: checkpoint(folder, n % 4),
    "delete": lambda folder, n: shutil.rmtree(folder / f"checkpoints/{n % 4}", ignore_errors=True),
    "segment": lambda folder, n: (
        (folder / "goodput.jsonl").exists()
        and (folder / "goodput.jsonl").rename(folder / f"goodput.{n + 1}.jsonl")
    ),
}


@given(
    changes=st.lists(
        st.tuples(st.sampled_from([*CHANGES, "copy", "fail", "begin"]), st.integers(0, 9))
    ),
    piece_bytes=st.sampled_from([4, 64]),
)
def test_a_bucket_holds_the_folder_after_any_changes_and_failures(
    tmp_path_factory, changes, piece_bytes
):
    folder, store = tmp_path_factory.mktemp("run"), buckets.MemoryStore()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(copies, "PIECE_BYTES", piece_bytes)
        upload, listing, published = Upload(folder, store, {}), Listing(tenure=1), {}
        for name, number in [*changes, ("copy", 0)]:
            if name == "begin":  # another run, which fetches the files
                shutil.rmtree(folder)
                folder.mkdir()
                listing = Listing(tenure=listing.tenure + 1, files=listing.files)
                known = download(
                    folder, store, listing.files, lambda _: True, on_damage=lambda *_: pytest.fail()
                )
                upload = Upload(folder, store, known)
            elif name == "copy":
                files, replaced = upload(listing), listing
                listing, published = listing.next(files), contents(folder)
                upload.settle()
                for key in replaced.keys - listing.keys:
                    store.delete(key)
            elif name == "fail":
                left = iter(range(number % 3))

                def fail(method, key, left=left):
                    if method == "put" and next(left, None) is None:
                        raise Unavailable("away")

                store.before = fail
                try:
                    upload(listing)  # and is not published
                except Unavailable:
                    pass
                store.before = lambda method, key: None
            else:
                CHANGES[name](folder, number)
            assert in_bucket(store, listing) == published


def test_a_file_that_grows_has_few_pieces_and_few_bytes_are_written_twice(tmp_path):
    store, upload, listing = buckets.MemoryStore(), None, Listing(tenure=1)
    upload, sent = Upload(tmp_path, store, {}), 0
    for number in range(200):
        write(tmp_path, "goodput.jsonl", b"%09d\n" % number, "ab")
        before = listing.keys
        listing = listing.next(upload(listing))
        upload.settle()
        sent += sum(p.num_bytes for p in listing.files["goodput.jsonl"] if p.key not in before)
        assert len(listing.files["goodput.jsonl"]) <= 9
    assert sent <= 10 * 2000


@given(st.lists(st.integers(0, 50)), st.integers(0, 100))
def test_what_stays_is_a_beginning(sizes, more):
    pieces = tuple(StoredPiece(str(n), size, "") for n, size in enumerate(sizes))
    kept = stay(pieces, sum(sizes) + more)
    assert kept == pieces[: len(kept)]
    for place in range(
        len(kept), len(pieces)
    ):  # what is written again is no larger than what follows
        assert sizes[place] <= sum(sizes[place + 1 :]) + more


def test_a_copy_that_failed_goes_on_with_the_rest(tmp_path):
    store = buckets.MemoryStore()
    checkpoint(tmp_path, 1)
    upload, listing, puts = Upload(tmp_path, store, {}), Listing(tenure=1), []

    def fail(method, key):
        puts.append(key)
        if "metadata" in key:
            raise Unavailable("away")

    store.before = fail
    with pytest.raises(Unavailable):
        upload(listing)
    store.before = lambda method, key: puts.append(key)
    files = upload(listing)
    assert len([key for key in puts if "leaf" in key]) == 1
    assert in_bucket(store, listing.next(files)) == contents(tmp_path)


def test_a_checkpoint_goes_as_a_whole_once_its_folder_is_gone(tmp_path):
    store = buckets.MemoryStore()
    checkpoint(tmp_path, 1)
    checkpoint(tmp_path, 2)
    upload, listing = Upload(tmp_path, store, {}), Listing(tenure=1)
    listing = listing.next(upload(listing))
    upload.settle()
    for path in ("checkpoints/1/state/d/leaf", "checkpoints/1/meta/metadata"):
        (tmp_path / path).unlink()
        assert upload(listing) == listing.files
        upload.settle()
        assert not upload.damaged
    shutil.rmtree(tmp_path / "checkpoints/1")
    assert {path.split("/")[1] for path in upload(listing)} == {"2"}


@pytest.mark.parametrize("lost", [["state/d/leaf"], ["state/d/leaf", "meta/metadata"]])
def test_files_that_a_cleaner_deletes_stay_in_the_bucket_and_are_reported(tmp_path, lost):
    store = buckets.MemoryStore()
    checkpoint(tmp_path, 1)
    whole = contents(tmp_path)
    upload, listing = Upload(tmp_path, store, {}), Listing(tenure=1)
    listing = listing.next(upload(listing))
    upload.settle()
    for path in lost:
        (tmp_path / "checkpoints/1" / path).unlink()
    reported = []
    for number in range(3):
        checkpoint(tmp_path, 2 + number)
        before, listing = listing, listing.next(upload(listing))
        upload.settle()
        for key in before.keys - listing.keys:
            store.delete(key)
        reported.append(upload.damaged)
        assert in_bucket(store, listing) == {**contents(tmp_path), **whole}
    assert reported == [set(), {"checkpoints/1"}, {"checkpoints/1"}]


def test_another_checkpoint_of_the_same_name_has_no_files_of_the_one_before(tmp_path):
    """Also if those of the one before were not all fetched."""
    store, there, here = buckets.MemoryStore(), tmp_path / "a", tmp_path / "b"
    checkpoint(there, 1)
    write(there, "checkpoints/1/state/d/other", b"of the first")
    listing = Listing(tenure=1).next(Upload(there, store, {})(Listing(tenure=1)))
    here.mkdir()
    small = download(
        here,
        store,
        listing.files,
        lambda path: not copies.LARGE.fullmatch(path),
        on_damage=lambda *_: pytest.fail(),
    )
    upload = Upload(here, store, small)
    (here / "checkpoints/1").rename(here / "aside")
    checkpoint(here, 1, b"second")
    shutil.rmtree(here / "aside")
    assert in_bucket(store, listing.next(upload(listing))) == contents(here)


def test_a_look_that_a_rename_and_a_deletion_overtake_is_repeated(tmp_path, monkeypatch):
    store = buckets.MemoryStore()
    upload, listing = Upload(tmp_path, store, {}), Listing(tenure=1)
    checkpoint(tmp_path, 1)
    write(tmp_path, "goodput.jsonl", b"line")
    walk, overtaken = copies._files, []

    def overtake(path):
        if path.name == "1" and len(overtaken) < 2:
            overtaken.append(path)
            checkpoint(tmp_path, 1 + len(overtaken))
            shutil.rmtree(path)
        if path.name == "goodput.jsonl" and len(overtaken) == 1:
            path.rename(tmp_path / "goodput.1.jsonl")
        return walk(path)

    monkeypatch.setattr(copies, "_files", overtake)
    files = upload(listing)
    assert overtaken
    monkeypatch.undo()
    assert in_bucket(store, listing.next(files)) == contents(tmp_path)
    assert {*files} == {
        "checkpoints/2/meta/metadata",
        "checkpoints/2/state/d/leaf",
        "goodput.1.jsonl",
    }


def test_files_that_come_and_go_all_the_time_are_an_error(tmp_path, monkeypatch):
    numbers = iter(range(1000))
    monkeypatch.setattr(copies, "stamps", lambda folder: {"x": copies.Stamp(1, 1, next(numbers))})
    with pytest.raises(FileNotFoundError, match="come and go"):
        Upload(tmp_path, buckets.MemoryStore(), {})(Listing(tenure=1))


def test_what_was_not_fetched_stays_until_its_checkpoint_is_deleted(tmp_path):
    store = buckets.MemoryStore()
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    for step in (1, 2):
        checkpoint(tmp_path / "a", step)
    listing = Listing(tenure=1).next(Upload(tmp_path / "a", store, {})(Listing(tenure=1)))
    small = download(
        tmp_path / "b",
        store,
        listing.files,
        lambda path: not copies.LARGE.fullmatch(path),
        on_damage=lambda *_: pytest.fail(),
    )
    assert [*small] == ["checkpoints/1/meta/metadata", "checkpoints/2/meta/metadata"]
    upload = Upload(tmp_path / "b", store, small)
    assert upload(listing) == listing.files
    shutil.rmtree(tmp_path / "b/checkpoints/1")
    assert {path.split("/")[1] for path in upload(listing)} == {"2"}


def test_unfinished_and_local_files_are_not_copied(tmp_path):
    for path in (
        "checkpoints/3.orbax-checkpoint-tmp-1/state/x",
        "compilation_cache/program",
        "lock",
        ".writable.0",
        "goodput.1.tmp",
        "x.part",
    ):
        write(tmp_path, path, b"1")
    (tmp_path / "link").symlink_to("/etc/hostname")
    write(tmp_path, "kept", b"1")
    assert [*stamps(tmp_path)] == ["kept"]


def test_a_damaged_piece_is_left_out_and_named(tmp_path):
    store = buckets.MemoryStore()
    write(tmp_path, "a/x", b"content")
    write(tmp_path, "a/y", b"content")
    write(tmp_path, "a/z", b"content")
    listing = Listing(tenure=1)
    listing = listing.next(Upload(tmp_path / "a", store, {})(listing))
    store.put(listing.files["x"][0].key, b"Content")
    store.delete(listing.files["y"][0].key)
    told: dict[str, DamagedError] = {}
    (tmp_path / "b").mkdir()
    found = download(
        tmp_path / "b", store, listing.files, lambda _: True, on_damage=told.__setitem__
    )
    assert [*found] == ["z"]
    assert "is not what was written" in str(told["x"])
    assert "is missing" in str(told["y"])
    assert contents(tmp_path / "b") == {"z": b"content"}


def test_a_view_follows_the_run_and_adds_to_files_that_readers_keep_open(tmp_path):
    store, run = buckets.MemoryStore(), tmp_path / "run"
    upload, listing = Upload(run, store, {}), Listing(tenure=1)
    view = BucketView("memory://bucket", tmp_path / "view", store, lambda _: True)
    with pytest.raises(FileNotFoundError, match="No run has written to memory://bucket"):
        view.refresh()
    reader = None
    for number in range(6):
        write(run, "tensorboard/a/events.1", b"%d" % number * 7, "ab")
        checkpoint(run, number)
        if number > 1:
            shutil.rmtree(run / f"checkpoints/{number - 2}")
        before, generation = listing, store.objects.get(KEY)
        listing = listing.next(upload(listing))
        upload.settle()
        store.replace(KEY, packed(listing), generation and generation.generation)
        for key in before.keys - listing.keys:
            store.delete(key)
        view.refresh()
        assert contents(view.folder) == contents(run)
        reader = reader or open(view.folder / "tensorboard/a/events.1", "rb")
        assert reader.read() == b"%d" % number * 7
    reader.close()


def test_a_view_looks_again_if_the_run_deletes_what_it_reads(tmp_path):
    store, run = buckets.MemoryStore(), tmp_path / "run"
    write(run, "config.json", b"1")
    upload, listings = Upload(run, store, {}), [Listing(tenure=1)]

    def publish():
        listings.append(listings[-1].next(upload(listings[-1])))
        upload.settle()
        store.put(KEY, packed(listings[-1]))
        for key in listings[-2].keys - listings[-1].keys:
            store.delete(key)

    def once(method, key):
        if method == "get" and "config" in key:
            store.before = lambda method, key: None
            write(run, "config.json", b"22")
            publish()

    publish()
    store.before = once
    view = BucketView("memory://bucket", tmp_path / "view", store, lambda _: True)
    view.refresh()
    assert contents(view.folder) == {"config.json": b"22"}
