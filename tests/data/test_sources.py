"""Sources: the same samples by whatever way they are read, and errors that name the culprit."""

import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgoodput.data.datasets import as_source
from jaxgoodput.data.rows import check_same_kind, narrow
from jaxgoodput.data.sources import (
    ArraySource,
    GrainSource,
    Indexing,
    SequenceSource,
    Source,
    abstract_sample,
    is_endless,
)
from jaxgoodput.data.streams import StreamSource

INDICES = np.array([5, 0, 5, 2])


class Items:
    """Random access to whatever list it is given."""

    def __init__(self, items):
        self.items = items

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        return self.items[index]


def nested(size=7):
    """Three levels: dict of tuple of dict."""
    rng = np.random.default_rng(1)
    return {
        "image": (
            {"pixels": rng.random((size, 2, 3), np.float32), "scale": rng.random(size)},
            np.arange(size),
        ),
        "label": np.arange(size, dtype=np.int8) % 3,
    }


def test_every_way_of_reading_gives_the_same_batch():
    arrays = nested()
    items = [jax.tree.map(lambda x: x[i], arrays) for i in range(7)]  # noqa: B023

    class Batched(Items):
        def __getitem__(self, index):
            if isinstance(index, np.ndarray):
                return jax.tree.map(lambda x: x[index], arrays)
            raise AssertionError("declared to be read by arrays of indices")

        def __getitems__(self, indices):
            assert isinstance(indices, list)
            return [items[i] for i in indices]

    expected = jax.tree.map(lambda x: x[INDICES], arrays)
    sources = [
        as_source(arrays),
        as_source(items),
        as_source(Items(items)),
        as_source(Batched(items), indexing="array"),
        as_source(Batched(items), indexing="getitems"),
    ]
    for source in sources:
        assert len(source) == 7
        got = source.batch(INDICES)
        assert jax.tree.structure(got) == jax.tree.structure(expected)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
            np.testing.assert_array_equal(a, b)
            assert a.dtype == b.dtype
        assert abstract_sample(source) == abstract_sample(sources[0])


def test_a_sample_is_described_as_the_devices_will_hold_it():
    kind = abstract_sample(as_source(nested()))
    pixels, index = kind["image"]
    assert pixels["pixels"] == jax.ShapeDtypeStruct((2, 3), np.float32)
    assert pixels["scale"] == jax.ShapeDtypeStruct((), np.float32)
    assert index == jax.ShapeDtypeStruct((), np.int32)
    assert kind["label"] == jax.ShapeDtypeStruct((), np.int8)


def test_arrays_of_every_origin(tmp_path):
    np.savez(tmp_path / "data.npz", x=np.arange(6.0), y=np.arange(6))
    on_disk = np.lib.format.open_memmap(tmp_path / "x.npy", mode="w+", dtype=np.int16, shape=(6,))
    on_disk[:] = np.arange(6)
    with np.load(tmp_path / "data.npz") as npz:
        assert as_source(npz).batch(INDICES)["y"].tolist() == INDICES.tolist()
    for dataset in (on_disk, jnp.arange(6), np.arange(6)):
        rows = as_source(dataset).batch(INDICES)
        assert type(rows) is np.ndarray and rows.tolist() == INDICES.tolist()
    first, second = as_source((np.arange(6), np.arange(6) * 2)).batch(INDICES)
    np.testing.assert_array_equal(first * 2, second)


def test_batches_are_fresh_memory():
    arrays = {"x": np.arange(4.0)}
    source = as_source(arrays)
    source.batch(np.arange(4))["x"][:] = -1
    assert arrays["x"].tolist() == [0, 1, 2, 3]

    class View(Items):
        def __getitem__(self, index):
            return self.items[: len(index)]

    buffer = np.arange(4.0)
    as_source(View(buffer), indexing="array").batch(np.arange(4))[:] = -1
    assert buffer.tolist() == [0, 1, 2, 3]


def test_a_source_of_the_users_own_is_taken_as_it_is():
    class Squares(Source):
        def __len__(self):
            return 10

        def batch(self, indices):
            return indices**2

    source = Squares()
    assert as_source(source) is source


@pytest.mark.parametrize(
    ("dataset", "kind", "message"),
    [
        ({"x": np.zeros((3, 2)), "y": np.zeros(4)}, ValueError, r"\['x'\] has 3 rows.*\['y'\].*4"),
        ({"x": {"a": np.zeros(3)}, "y": np.zeros(4)}, ValueError, r"\['x'\]\['a'\] has 3"),
        ({}, ValueError, "no arrays"),
        ({"x": np.zeros((0, 2))}, ValueError, "empty"),
        ([], ValueError, "empty: list has 0 samples"),
        ({"x": [1, 2]}, TypeError, r"\['x'\]\[0\].*int.*asarray"),
        ({"x": np.float32(1)}, ValueError, "single number"),
        ({"x": np.array(["a", "b"])}, TypeError, r"\['x'\].*dtype <U1"),
        ({"x": np.array([None, {}])}, TypeError, "dtype object, .* text"),
        ({"x": np.array([1.5, 2], object)}, TypeError, r'all numbers.*astype\("float32"\)'),
        (iter([1, 2]), TypeError, "an iterator .list_iterator., which can be read once only"),
        (3, TypeError, "random access, but int has no __len__ and no __getitem__"),
    ],
)
def test_unusable_datasets_are_named(dataset, kind, message):
    with pytest.raises(kind, match=message):
        as_source(dataset)


@pytest.mark.parametrize(
    ("bad", "kind", "message"),
    [
        ({"x": np.zeros(3)}, ValueError, "Samples 0 and 2 differ in structure"),
        (
            {"x": np.zeros(4), "y": 1},
            ValueError,
            r"\['x'\] is float64\[3\] in sample 0 but float64\[4\] in sample 2",
        ),
        (
            {"x": np.zeros(3), "y": 1.5},
            ValueError,
            r"\['y'\] is int64\[\] in sample 0 but float64\[\] in sample 2",
        ),
        ({"x": np.zeros(3), "y": "cat"}, ValueError, r"\['y'\].*<U3\[\] in sample 2"),
        (None, ValueError, "differ in structure"),
    ],
)
def test_samples_that_cannot_be_stacked_name_the_sample_and_the_leaf(bad, kind, message):
    source = as_source([{"x": np.zeros(3), "y": 1}] * 2 + [bad])
    source.batch(np.array([0, 1]))
    with pytest.raises(kind, match=message):
        source.batch(np.array([0, 1, 2]))


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        ({"x": [0.5] * 8}, r"sample 2 \['x'\] is a list of 8 floats: return one array .*asarray"),
        ({"x": [[1, 2], [3]]}, r"sample 2 \['x'\] is a list of 2 lists"),
        (([1, 2.5], 3), r"sample 2 \[0\] is a list of 2 numbers"),
    ],
)
def test_a_list_of_numbers_in_a_sample_is_refused(sample, message):
    with pytest.raises(TypeError, match=message):
        as_source([sample] * 3).batch(np.array([2, 0]))


def test_lists_that_hold_arrays_are_nodes_of_a_sample():
    found = as_source([{"x": [np.zeros(2), np.ones(())]}] * 3).batch(np.array([2, 0]))
    assert [x.shape for x in found["x"]] == [(2, 2), (2,)]


def test_text_in_samples_is_refused():
    with pytest.raises(TypeError, match=r"\['name'\].*dtype <U2.*token"):
        as_source([{"name": "ab"}] * 3).batch(np.array([0]))


def test_an_exception_of_the_dataset_names_the_sample():
    class Broken(Items):
        def __getitem__(self, index):
            if np.any(np.asarray(index) == 5):
                raise OSError("disk gone")
            return super().__getitem__(index)

        def __getitems__(self, indices):
            return [self[i] for i in indices]

    dataset = Broken(list(range(9)))
    expected: list[tuple[Indexing, str]] = [
        ("one", "sample 5 .*OSError: disk gone"),
        ("array", r"samples \[1, 5\] .*OSError"),
        ("getitems", r"samples \[1, 5\] .*OSError"),
    ]
    for indexing, message in expected:
        with pytest.raises(RuntimeError, match=message) as caught:
            as_source(dataset, indexing=indexing).batch(np.array([1, 5]))
        assert isinstance(caught.value.__cause__, OSError)


def test_promises_of_batched_reading_are_checked():
    class Wrong(Items):
        def __getitem__(self, index):
            return {"x": np.zeros(3)}

        def __getitems__(self, indices):
            return [0]

    with pytest.raises(ValueError, match=r"\['x'\] of shape \(3,\) for 2 indices"):
        as_source(Wrong([0] * 5), indexing="array").batch(np.array([0, 1]))
    with pytest.raises(ValueError, match="1 items for 2 indices"):
        as_source(Wrong([0] * 5), indexing="getitems").batch(np.array([0, 1]))
    with pytest.raises(TypeError, match="no __getitems__"):
        as_source([1, 2], indexing="getitems")


def test_identifiers_that_do_not_fit_are_an_error_rather_than_wrapped_around():
    assert narrow({"x": np.array([2**31 - 1])})["x"].dtype == np.int32
    assert narrow(np.array([0.5])).dtype == np.float32
    with pytest.raises(ValueError, match=r"\['id'\] holds 2147483648.*int32.*x64"):
        narrow({"id": np.array([0, 2**31])})
    with pytest.raises(ValueError, match="holds -2147483649"):
        narrow({"id": np.array([-(2**31) - 1, 2**31])})
    with jax.enable_x64(True):
        assert narrow(np.array([2**40])).dtype == np.int64


def test_floats_that_do_not_fit_are_an_error_rather_than_infinite():
    wide = np.array([[1.0, 2.0], [np.inf, -1e300]])
    with pytest.raises(ValueError, match=r"\['x'\] holds -1e\+300 in row 1 .*float32.*infinite"):
        narrow({"x": wide})
    with pytest.raises(ValueError, match="complex64"):
        narrow(np.array([1e300j]))
    kept = narrow(np.array([np.inf, -np.inf, np.nan, 3.4e38, 1e-300]))
    assert (
        kept.tolist()[:2] == [np.inf, -np.inf] and np.isnan(kept[2]) and np.isfinite(kept[3:]).all()
    )
    with jax.enable_x64(True):
        assert narrow(wide)[1, 1] == -1e300


@pytest.mark.parametrize(
    ("rows", "kind", "message"),
    [
        ({"x": np.zeros((2, 3))}, ValueError, r"from float64\[4\] to float64\[3\]"),
        ({"x": np.zeros((2, 4), np.int32)}, ValueError, r"from float64\[4\] to int32\[4\]"),
        ({"y": np.zeros((2, 4))}, ValueError, "changed their structure"),
        ({"x": np.zeros((3, 4))}, ValueError, r"shape \(3, 4\) for 2 samples"),
        ({"x": 1.0}, TypeError, "as float"),
        ({}, ValueError, "no numbers at all"),
    ],
)
def test_batches_of_another_kind_are_named(rows, kind, message):
    expected = check_same_kind({"x": np.zeros((5, 4))}, None, 5)
    with pytest.raises(kind, match=message):
        check_same_kind(rows, expected, 2)


def test_bfloat16_is_a_number():
    rows = np.zeros(3, jnp.bfloat16)
    assert abstract_sample(as_source({"x": rows}))["x"].dtype == jnp.bfloat16


def test_grain_is_recognised_without_importing_it():
    # A stand-in with grain's name, so that this runs where grain is absent.
    base = type("MapDataset", (Items,), {"__module__": "grain._src.python.dataset.dataset"})
    source = as_source(type("Mapped", (base,), {})([{"x": 1}, None]))
    assert isinstance(source, GrainSource)
    assert source.batch(np.array([0]))["x"].tolist() == [1]
    with pytest.raises(ValueError, match="no sample 1: it was filtered"):
        source.batch(np.array([0, 1]))
    assert type(as_source(Items([1]))) is SequenceSource
    assert type(as_source({"x": np.zeros(1)})) is ArraySource


def test_a_grain_map_dataset_is_read_by_random_access():
    grain = pytest.importorskip("grain", reason="grain (the extra of that name) is not installed")
    dataset = grain.MapDataset.source(np.arange(20)).map(lambda x: {"x": x, "square": x**2})
    source = as_source(dataset)
    assert isinstance(source, GrainSource) and len(source) == 20
    rows = source.batch(INDICES)
    assert rows["square"].tolist() == (INDICES**2).tolist()
    with pytest.raises(ValueError, match="filtered"):
        as_source(dataset.filter(lambda row: row["x"] % 2 == 0)).batch(np.arange(4))


def noisy(grain, size=20, **options):
    """A grain data set whose samples are their numbers and something random."""
    numbers = grain.MapDataset.source(np.arange(size)).seed(7)
    return numbers.random_map(lambda x, rng: {"id": x, "noise": rng.random()}, **options)


def test_grain_draws_anew_in_every_epoch_and_the_same_again_after_a_restart():
    grain = pytest.importorskip("grain", reason="grain (the extra of that name) is not installed")
    sources = [as_source(noisy(grain)) for _ in range(2)]  # of two processes
    seen = []
    for epoch in range(5):
        first, again = (s.batch_of_epochs(INDICES, np.full(4, epoch)) for s in sources)
        assert first["id"].tolist() == INDICES.tolist()
        assert first["noise"].tolist() == again["noise"].tolist()
        seen.append(first["noise"][1])
    assert len(set(seen)) == 5
    first = sources[0].batch(INDICES)
    assert first["noise"][1] == seen[0]  # an evaluation's
    mixed = sources[0].batch_of_epochs(np.full(5, INDICES[1]), np.arange(5))
    assert mixed["noise"].tolist() == seen


def test_a_grain_data_set_that_repeats_is_read_from_place_to_place():
    grain = pytest.importorskip("grain", reason="grain (the extra of that name) is not installed")
    source = as_source(noisy(grain).shuffle().repeat())
    assert is_endless(source) and not is_endless(as_source(noisy(grain)))
    rows = source.batch_of_epochs(np.arange(60), np.zeros(60, int))
    epochs = rows["id"].reshape(3, 20)
    assert (np.sort(epochs) == np.arange(20)).all() and len(set(rows["noise"].tolist())) == 60
    assert len({tuple(epoch) for epoch in epochs.tolist()}) == 3


def test_sources_may_take_the_epoch():
    class Shifted(Items):
        def item_of_epoch(self, index, epoch):
            return {"x": self.items[index] + 100 * epoch}

    class Times(Source):
        def __len__(self):
            return 7

        def batch(self, indices):
            return {"x": indices}

        def batch_of_epochs(self, indices, epochs):
            return {"x": indices + 100 * epochs}

    epochs = np.array([0, 1, 2, 0])
    for source in (as_source(Shifted(list(range(7)))), Times()):
        rows = source.batch_of_epochs(INDICES, epochs)
        assert rows["x"].tolist() == (INDICES + 100 * epochs).tolist()
        assert source.batch(INDICES)["x"].tolist() == INDICES.tolist()
    plain = as_source(list(range(7)))
    assert plain.batch_of_epochs(INDICES, epochs).tolist() == INDICES.tolist()


def test_a_grain_stream_goes_on_where_it_stopped():
    grain = pytest.importorskip("grain", reason="grain (the extra of that name) is not installed")

    def stream():
        return as_source(noisy(grain).shuffle().repeat(3).to_iter_dataset())

    whole, first, second = stream(), stream(), stream()
    assert isinstance(whole, StreamSource) and isinstance(first, StreamSource)
    assert isinstance(second, StreamSource)
    assert whole.available(0, 100) == 60
    expected = whole.batch(np.arange(60))
    for start in range(0, 28, 4):
        first.available(start, 8)  # some are read ahead
        first.release(start + 4)
    second.restore(first.state_at(28))
    assert second.available(28, 100) == 32
    rows = second.batch(np.arange(28, 60))
    assert jax.tree.map(np.ndarray.tolist, rows) == jax.tree.map(
        lambda x: x[28:].tolist(), expected
    )


@pytest.mark.parametrize(
    "rows",
    [
        np.asfortranarray(np.arange(400_000.0).reshape(100_000, 4)),
        np.arange(800_000.0).reshape(100_000, 8)[:, ::2],
        np.arange(800_000.0).reshape(200_000, 4)[::2],
    ],
    ids=["columns", "every second column", "every second row"],
)
def test_a_batch_costs_no_copy_of_an_array_whose_rows_are_not_contiguous(rows):
    source = as_source({"x": rows})
    tracemalloc.start()
    try:
        batch = source.batch(INDICES)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    np.testing.assert_array_equal(batch["x"], np.stack([rows[i] for i in INDICES]))
    assert not np.shares_memory(batch["x"], rows)
    assert peak < rows.nbytes / 10
