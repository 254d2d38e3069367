"""The tables of `jaxgoodput plan`: figures are the analysis's, and what is not known is not shown."""

import math
import types

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxgoodput.engine.analysis.analysis import Analysis
from jaxgoodput.engine.analysis.collectives import CollectiveUse
from jaxgoodput.engine.analysis.peak import Buffer, PeakMemory
from jaxgoodput.engine.chips import CHIPS
from jaxgoodput.goodput.memory import StepBytes
from jaxgoodput.launcher.planning import table
from jaxgoodput.parallel.collectives import Received
from jaxgoodput.parallel.strategy import Strategy
from jaxgoodput.train.ask.outlook import LeftOut, Outlook, by_throughput

MIB = 2**20
ROOFLINES = {"arithmetic": 0.2, "memory": 0.1, "links": 0.05, "network": 0.3}


def outlook(rooflines=None, exposed_s=0.25, activations=2.0 * MIB, micro_batches=2):
    uses = (
        CollectiveUse("all-gather", Received(3.0 * MIB, 1.0 * MIB), 4, True, ("up/kernel",)),
        CollectiveUse(
            "all-reduce", Received(9.0 * MIB, 0.0), 1, False, ("backward mlp", *"abcdef")
        ),
    )
    buffers = tuple(
        Buffer(name=f"p{i}", kind="parameters", shape="f32[2]", size_bytes=(9 - i) * MIB)
        for i in range(7)
    )
    need = StepBytes(arguments=8 * MIB, outputs=0, temporaries=4 * MIB)
    peak = PeakMemory(
        parameters=5.0 * MIB,
        optimizer=3.0 * MIB,
        activations=activations,
        temporaries=2.0 * MIB,
        buffers=buffers,
    )
    return Outlook(
        strategy=Strategy(fsdp=4),
        micro_batch_size=3,
        num_micro_batches=micro_batches,
        largest_micro_batch_size=99,
        budget=100.0 * MIB,
        analysis=Analysis(need, {"bfloat16": 8e9}, 50, uses, peak),
        rooflines_s=ROOFLINES if rooflines is None else rooflines,
        exposed_s=exposed_s,
        compile_s=1.5,
    )


def test_memory_is_shown_by_kind():
    row = table.memory_row(outlook())
    assert row["fits"] == "yes" and row["peak MiB"] == "12"
    kinds = [row[kind] for kind in ("parameters", "optimizer", "activations", "temporaries")]
    assert kinds == ["5.0", "3.0", "2.0", "2.0"]
    assert (row["batch"], row["micro-batch"], row["largest"]) == ("24", "3 x 2", "99")
    assert table.memory_row(outlook(activations=math.nan))["activations"] == "-"


def test_a_step_counts_all_micro_batches_and_what_crosses_between_nodes():
    row = table.step_row(outlook(), 4, table.Rates())
    assert (row["inside MiB"], row["between MiB"]) == ("24.0", "2.0")
    assert (row["kernels"], row["GFLOP"], row["exposed"]) == ("100", "4", "1 of 2")
    # 0.2 s of arithmetic and 0.25 s of waiting, twice.
    assert (row["step ms"], row["bound by"]) == ("900.0", "collectives")
    assert "tokens/s" not in row and "per 1e9 tokens" not in row


@pytest.mark.parametrize(
    ("rooflines", "exposed_s", "expected"),
    [
        ({}, 0.25, "collectives"),  # 0.2 + 0.25, although the network takes 0.3
        ({}, 0.15, "arithmetic"),
        ({"memory": 0.25}, 0.15, "memory"),
        ({}, 0.05, "network"),
        ({"network": 0.0, "links": 0.5}, 0.1, "links"),
        ({"network": 0.0, "links": 0.0}, 0.0, "arithmetic"),
    ],
)
def test_a_step_is_bound_by_its_largest_part(rooflines, exposed_s, expected):
    one = outlook(rooflines={**ROOFLINES, **rooflines}, exposed_s=exposed_s)
    assert one.bound_by == expected
    assert table.step_row(one, 4, table.Rates())["bound by"] == expected


def test_without_a_known_chip_no_time_is_shown():
    row = table.step_row(outlook(rooflines={}, exposed_s=math.nan), 4, table.Rates(7, 1.0))
    assert not {"step ms", "samples/s", "tokens/s", "per 1e9 tokens"} & set(row)


@given(
    exposed=st.floats(0, 1),
    times=st.fixed_dictionaries({name: st.floats(1e-6, 1) for name in ROOFLINES}),
)
def test_a_step_takes_at_least_each_roofline_and_what_is_exposed(exposed, times):
    one = outlook(rooflines=times, exposed_s=exposed, micro_batches=1)
    assert one.step_s >= max(times.values())
    assert one.step_s >= max(times["arithmetic"], times["memory"]) + exposed
    assert one.step_s <= sum(times.values()) + exposed


@given(price=st.floats(0.01, 100), tokens=st.integers(1, 10_000), devices=st.integers(1, 64))
def test_a_price_is_that_of_all_devices_for_as_long_as_the_tokens_take(price, tokens, devices):
    row = table.step_row(outlook(), devices, table.Rates(tokens, price))
    seconds = 1e9 / (24 / 0.9 * tokens)
    expected = price * devices * seconds / 3600
    assert float(row["per 1e9 tokens"].replace(",", "")) == pytest.approx(expected, abs=0.01)
    plain = table.step_row(outlook(), devices, table.Rates(None, price))
    assert "per 1e6 samples" in plain and "per 1e9 tokens" not in plain


def test_the_legend_names_the_source_of_the_rates():
    chip = CHIPS["NVIDIA H100 80GB HBM3"]
    lines = table.legend([table.step_row(outlook(), 4, table.Rates())], chip)
    assert "NVIDIA H100 data sheet" in " ".join(lines)
    assert table.legend([], chip) == []


def test_a_type_without_a_rate_is_named_and_no_time_is_shown():
    one = outlook(rooflines={**ROOFLINES, "arithmetic": math.nan})
    row = table.step_row(one, 4, table.Rates(7, 1.0))
    times = ("step ms", "bound by", "samples/s", "tokens/s", "per 1e9 tokens")
    assert [row[name] for name in times] == ["-"] * 5
    lines = table.legend([row], CHIPS["NVIDIA L4"], ["bfloat16", "float64"])
    assert "multiplies float64, and NVIDIA L4 data sheet" in lines[-1]
    assert by_throughput([one, outlook()])[-1] is one


def test_the_five_largest_buffers_and_collectives_are_named():
    text = "\n".join(table.explained(outlook()))
    assert [f"p{i}" in text for i in range(7)] == [True] * 5 + [False] * 2
    assert text.index("backward mlp") < text.index("up/kernel"), "the largest first"
    assert "backward mlp, a, b, c and 3 more" in text
    assert "exposed  all-gather" in text and "hidden   all-reduce" in text
    unknown = "\n".join(table.explained(outlook(activations=math.nan)))
    assert "does not tell what is alive" in unknown and "does not tell" not in text


def test_reasons_that_differ_in_numbers_take_one_line():
    reasons = [f"no parameter is cut over expert={n}" for n in (2, 4, 8)] + ["another one"]
    lines = table.left_out([LeftOut(Strategy(expert=n), r) for n, r in enumerate(reasons, 2)])
    assert lines == [
        "left out: expert2 and 2 more: no parameter is cut over expert=2",
        "left out: expert5: another one",
    ]


def test_tokens_are_those_of_the_configuration():
    config = types.SimpleNamespace(reporting=types.SimpleNamespace(tokens_per_sample=64))
    assert table.rates_of(config, 2.5) == table.Rates(64, 2.5)
