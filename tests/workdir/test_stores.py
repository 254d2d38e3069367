"""Two real clients against emulators: what the room builds on holds for each, and failures are told apart."""

import math
import threading

import buckets
import pytest

from jaxgoodput.workdir.objects import Changed, ObjectStore, StoreError, Unavailable


def store_of(emulator: buckets.Emulator, prefix: str, bucket: str = buckets.NAME) -> ObjectStore:
    with buckets.environment(emulator):
        if emulator.kind == "gs":
            from jaxgoodput.workdir.gcs import GcsStore

            return GcsStore(bucket, prefix)
        from jaxgoodput.workdir.s3 import S3Store

        return S3Store(bucket, prefix)


@pytest.fixture(scope="module", params=["gs", pytest.param("s3", marks=pytest.mark.slow)])
def emulator(request):
    with buckets.emulator(request.param) as found:
        yield found


def test_an_object_is_what_was_written(emulator):
    store = store_of(emulator, "plain/a")
    assert store.get("x/y") is None
    data = bytes(range(256)) * 1000
    store.put("x/y", data)
    store.put("x/z@0", b"")
    assert store.get("x/y").data == data
    assert store.get("x/z@0").data == b""
    assert sorted(store.keys("x/")) == ["x/y", "x/z@0"]
    assert list(store_of(emulator, "plain").keys("a/x/y")) == ["a/x/y"]
    store.delete("x/y")
    store.delete("x/y")
    assert store.get("x/y") is None


def test_of_many_who_replace_an_object_one_succeeds(emulator):
    store = store_of(emulator, "race")
    generation = None
    for turn in range(3):
        won, lost = [], []

        def replace(number, turn=turn, generation=generation, won=won, lost=lost):
            try:
                data = b"%d of %d" % (number, turn)
                won.append((data, store.replace("it", data, generation)))
            except Changed:
                lost.append(number)

        threads = [threading.Thread(target=replace, args=(n,)) for n in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        ((data, generation),) = won
        assert len(lost) == 7
        assert store.get("it").data == data
        assert store.get("it").generation == generation


def test_what_is_gone_is_not_replaced(emulator):
    store = store_of(emulator, "gone")
    generation = store.replace("it", b"1", None)
    store.delete("it")
    with pytest.raises(Changed):
        store.replace("it", b"2", generation)


def test_a_bucket_that_is_not_there_is_named(emulator):
    store = store_of(emulator, "run", bucket="elsewhere")
    for ask in (
        lambda: store.get("workdir.json"),
        lambda: store.put("x", b"1"),
        lambda: store.replace("workdir.json", b"1", None),
        lambda: list(store.keys("")),
    ):
        with pytest.raises(StoreError, match="there is no bucket 'elsewhere'") as refused:
            ask()
        assert not isinstance(refused.value, Unavailable)


@pytest.mark.parametrize(
    "fault",
    [buckets.Fault(status=503), buckets.Fault(cut_after=0.5), buckets.Fault(lose_answer=True)],
    ids=["503", "cut", "lost"],
)
def test_what_may_pass_is_unavailable(emulator, fault):
    faults = buckets.Faults()
    with buckets.faulty(emulator, faults) as through:
        store = store_of(through, "unavailable")
        store.put("x", b"1" * 1000)
        faults.choose = lambda request: fault
        for ask in (
            lambda: store.get("x"),
            lambda: store.put("x", b"2" * 1000),
            lambda: store.replace("y", b"1" * 1000, None),
            lambda: list(store.keys("")),
            lambda: store.delete("x"),
        ):
            with pytest.raises(Unavailable):
                ask()


def test_a_lost_answer_may_have_taken_effect_and_a_cut_body_has_not(emulator):
    faults = buckets.Faults()
    with buckets.faulty(emulator, faults) as through:
        store = store_of(through, "effects")
        lost, cut = buckets.Fault(lose_answer=True), buckets.Fault(cut_after=0.9)
        for fault, wanted in ((lost, b"1" * 1000), (cut, None)):
            faults.choose = lambda request, fault=fault: fault
            with pytest.raises(Unavailable):
                store.replace("it", b"1" * 1000, None)
            faults.choose = lambda request: None
            there = store.get("it")
            assert (there and there.data) == wanted
            store.delete("it")


def test_a_refusal_is_no_passing_failure_and_says_what_is_needed(emulator):
    faults = buckets.Faults()
    with buckets.faulty(emulator, faults) as through:
        store = store_of(through, "refused")
        faults.choose = lambda request: buckets.Fault(status=403)
        with pytest.raises(StoreError, match="storage.objectUser|s3:PutObject") as refused:
            store.put("x", b"1")
        assert not isinstance(refused.value, Unavailable)


def test_what_changes_on_its_way_is_noticed():
    """Against Google's protocol: the emulator of S3 believes the checksum that it is sent."""
    faults = buckets.Faults()
    with buckets.emulator("gs") as emulator, buckets.faulty(emulator, faults) as through:
        store = store_of(through, "flipped")
        faults.choose = lambda request: buckets.Fault(flip=True) if request.writes else None
        with pytest.raises(Unavailable, match="was changed on its way|could not write"):
            store.put("x", b"content")
        assert faults.num_faults == 1


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gs", "s3"])
def test_a_slow_link_writes_a_piece_that_takes_longer_than_a_request_may(kind, monkeypatch):
    """Google's client hands over what it sends at once, and that is limited; the other sends small parts."""
    faults, data = buckets.Faults(bytes_per_s=2 * 2**20), bytes(24 * 2**20)
    monkeypatch.setattr("jaxgoodput.workdir.gcs.SENDING", {"retry": None, "timeout": (5.0, 5.0)})
    monkeypatch.setattr("jaxgoodput.workdir.s3.REQUEST_S", 5.0)
    with buckets.emulator(kind) as emulator, buckets.faulty(emulator, faults) as through:
        store = store_of(through, "slow")
        store.put("x", data)
        faults.bytes_per_s = math.inf
        assert store.get("x").data == data


def test_a_piece_larger_than_one_message_of_the_client(emulator):
    store = store_of(emulator, "large")
    data = b"12345678" * (9 * 2**17)  # Google's client sends more than 8 MiB in another way
    store.put("x", data)
    assert store.get("x").data == data
