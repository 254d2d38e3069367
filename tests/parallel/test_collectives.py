"""What collectives send is read from the program's text, within nodes and between them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxgoodput.parallel.collectives import received, received_bytes


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("%p = f32[8,2]{1,0} all-gather(f32[1,2] %x), replica_groups={{0,1,2,3,4,5,6,7}}", 8 * 56),
        (
            "%p = (f32[4], f32[4]) all-to-all(f32[4] %a, f32[4] %b), replica_groups=[4,2]<=[8]",
            8 * 16,
        ),
        (
            "%p = bf16[4] collective-permute(bf16[4] %a), source_target_pairs={{0,1},{1,0},{2,2}}",
            16,
        ),
        ("%p = pred[16] all-reduce(pred[16] %a), replica_groups=[1,8]<=[8], to_apply=%or", 8 * 28),
        ("%p = f32[2] reduce-scatter(f32[8] %a), replica_groups={{0,1,2,3},{4,5,6,7}}", 8 * 24),
        ("%p = (f32[2], f32[8]) all-gather-start(f32[2] %a), replica_groups=[2,4]<=[8]", 8 * 24),
        (
            "%p = ((f32[2]{0}, f32[4]{0}), (f32[16]{0}, f32[32]{0})) all-gather-start(%x, %y), "
            "replica_groups=[1,8]<=[8]",
            8 * (16 + 32) * 4 * 7 // 8,
        ),
        ("%p = f32[8] add(f32[8] %a, f32[8] %b)", 0),
    ],
)
def test_traffic_is_read_from_the_program(line, expected):
    assert received_bytes(line, 8) == expected


def test_a_collective_in_an_unknown_form_is_not_taken_for_silence():
    with pytest.raises(ValueError, match="a collective-broadcast in a form that is not known"):
        received_bytes("%p = f32[4] collective-broadcast(f32[4] %x), replica_groups={{0,1}}", 8)


@pytest.mark.parametrize("form", ["ragged-all-to-all", "ragged-all-to-all-start"])
def test_a_collective_of_any_amount_is_refused_with_another_that_can_be_counted(form):
    result = "(f32[8]{0}, f32[8]{0})" if form.endswith("start") else "f32[8]{0}"
    line = f"%r = {result} {form}(f32[8]{{0}} %x), replica_groups={{{{0,1}}}}"
    with pytest.raises(ValueError, match="decided while the program runs.*jax.lax.all_to_all"):
        received(line, [0, 0])


KINDS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all")


@st.composite
def grouped(draw):
    """A collective over groups of one size, as XLA writes it, and a node for each device."""
    size, count = draw(st.sampled_from([2, 3, 4, 8])), draw(st.integers(1, 4))
    devices = draw(st.permutations(range(size * count)))
    groups = np.array(devices).reshape(count, size)
    listed = ",".join("{" + ",".join(map(str, group)) + "}" for group in groups)
    kind = draw(st.sampled_from(KINDS))
    length = 24 * draw(st.integers(1, 5))
    nodes = draw(st.lists(st.integers(0, 3), min_size=size * count, max_size=size * count))
    text = f"%x = f32[{length}]{{0}} {kind}(f32[1]{{0}} %p), replica_groups={{{listed}}}, to_apply=%add"
    return kind, groups, 4 * length, nodes, text


@given(case=grouped())
def test_nodes_change_where_bytes_come_from_and_not_how_many_they_are(case):
    _, groups, _, nodes, text = case
    count = groups.size
    one, alone = received(text, [0] * count), received(text, list(range(count)))
    split = received(text, nodes)
    assert one.between == 0 and alone.inside == pytest.approx(0)
    assert split.total == pytest.approx(one.total) == pytest.approx(alone.total)
    assert split.inside >= -1e-9 and split.between >= 0


@given(case=grouped())
def test_between_nodes_goes_what_a_node_has_not(case):
    """Counted part by part: a part that a node lacks crosses once if all of its devices want the same."""
    kind, groups, result, nodes, text = case
    expected = 0.0
    for group in groups:
        part = result if kind == "reduce-scatter" else result / len(group)
        for node in {nodes[device] for device in group}:
            here = [d for d in group if nodes[d] == node]
            lacking = len(group) - len(here)
            copies = len(here) if kind == "all-to-all" else 2 if kind == "all-reduce" else 1
            expected += part * lacking * copies
    assert received(text, nodes).between == pytest.approx(expected)


@given(
    dims=st.lists(st.sampled_from([1, 2, 3, 4]), min_size=1, max_size=3),
    data=st.data(),
)
def test_groups_in_short_form_are_those_in_long_form(dims, data):
    order = data.draw(st.permutations(range(len(dims))))
    total = int(np.prod(dims))
    size = data.draw(st.sampled_from([n for n in range(1, total + 1) if total % n == 0]))
    numbers = np.arange(total).reshape(dims).transpose(order).reshape(-1, size)
    short = f"[{total // size},{size}]<=[{','.join(map(str, dims))}]T({','.join(map(str, order))})"
    long = "{" + ",".join("{" + ",".join(map(str, group)) + "}" for group in numbers) + "}"
    nodes = data.draw(st.lists(st.integers(0, 2), min_size=total, max_size=total))
    line = "%x = f32[24]{{0}} all-gather(f32[1]{{0}} %p), replica_groups={}, dimensions={{0}}"
    assert received(line.format(short), nodes) == received(line.format(long), nodes)


@given(sizes=st.lists(st.sampled_from([1, 2, 3, 4]), min_size=1, max_size=4), data=st.data())
def test_groups_along_axes_of_a_mesh_are_those_in_long_form(sizes, data):
    """XLA names a mesh and the axes that a collective runs along; an axis may be split in pieces."""
    total = int(np.prod(sizes))
    order = data.draw(st.permutations(range(total)))
    written = data.draw(st.sampled_from(["", ", device_ids=(" + ",".join(map(str, order)) + ")"]))
    devices = np.array(order if written else range(total)).reshape(sizes)
    over = data.draw(st.sets(st.sampled_from(range(len(sizes)))))
    others = [axis for axis in range(len(sizes)) if axis not in over]
    groups = devices.transpose([*others, *sorted(over)]).reshape(
        -1, int(np.prod([sizes[axis] for axis in over], initial=1))
    )
    mesh = ",".join(f"'axis_{axis}'={size}" for axis, size in enumerate(sizes))
    axes = ",".join(f"'axis_{axis}'" for axis in sorted(over))
    short = f"mesh[{mesh}]{written} {{{axes}}}"
    long = "{" + ",".join("{" + ",".join(map(str, group)) + "}" for group in groups) + "}"
    nodes = data.draw(st.lists(st.integers(0, 2), min_size=total, max_size=total))
    line = "%x = f32[24]{{0}} all-gather(f32[1]{{0}} %p), replica_groups={}, dimensions={{0}}"
    assert received(line.format(short), nodes) == received(line.format(long), nodes)


@pytest.mark.parametrize(
    ("short", "long"),
    [
        ("mesh['a'=2,'b'=4] {'b':(1)2}", "{{0,2},{1,3},{4,6},{5,7}}"),
        ("mesh['a'=2,'b'=4] {'b':(2)2}", "{{0,1},{2,3},{4,5},{6,7}}"),
        ("mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'a'}", "{{0,1},{2,3},{4,5},{6,7}}"),
        ("mesh['a'=8,'b'=1] {}", "{{0},{1},{2},{3},{4},{5},{6},{7}}"),
    ],
)
def test_pieces_of_an_axis_and_other_orders_of_devices(short, long):
    line = "%x = f32[24]{{0}} all-gather(f32[1]{{0}} %p), replica_groups={}, dimensions={{0}}"
    nodes = [0, 1, 2, 0, 1, 1, 2, 2]
    assert received(line.format(short), nodes) == received(line.format(long), nodes)


@pytest.mark.parametrize(
    "line",
    [
        "%x = ((f32[16,8]{1,0}, f32[8]{0}), (f32[2,8]{1,0}, f32[1]{0})) reduce-scatter-start(%a, %b), "
        "replica_groups=[1,8]<=[8], dimensions={0}",
        "%x = (f32[2,8]{1,0}, f32[1]{0}) reduce-scatter(%a, %b), replica_groups=[1,8]<=[8], dimensions={0}",
    ],
)
def test_the_start_of_a_collective_counts_its_results_and_not_its_operands(line):
    assert received_bytes(line, 8) == 8 * 7 * 4 * (16 + 1)


def test_the_start_of_an_exchange_counts_its_result_once():
    line = "%x = ((f32[8,4]{1,0}), f32[8,4]{1,0}) all-to-all-start(%a), replica_groups=[1,8]<=[8]"
    assert received_bytes(line, 8) == 8 * 7 * 4 * 4


def test_pairs_of_a_permutation_count_between_nodes_if_they_cross():
    line = (
        "%p = f32[4] collective-permute(f32[4] %a), source_target_pairs={{0,1},{1,2},{2,3},{3,3}}"
    )
    found = received(line, [0, 0, 1, 1])
    assert (found.inside, found.between) == (32, 16)


def test_groups_in_an_unknown_form_are_not_taken_for_all_devices():
    line = "%x = f32[8]{0} all-gather(f32[2]{0} %p), replica_groups=@mesh<a=2>, dimensions={0}"
    with pytest.raises(ValueError, match="replica groups in a form that is not known: 'replica_gr"):
        received(line, [0] * 8)


def test_a_group_of_all_devices_may_be_left_out():
    line = "%x = f32[8]{0} all-gather(f32[2]{0} %p), replica_groups={}, dimensions={0}"
    assert received_bytes(line, 4) == 4 * 8 * 3
