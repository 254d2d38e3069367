import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxgoodput._fields.serial import dumps, loads
from jaxgoodput.specs import (
    Allocation,
    ClusterSpec,
    JobSpec,
    Node,
    Reservation,
    Shape,
)

names = st.text(min_size=1, max_size=5)


@given(
    count=st.integers(1, 100),
    state=st.sampled_from(["up", "draining", "down"]),
    labels=st.dictionaries(names, names, max_size=3),
    start_s=st.floats(0, 1e9),
    tenant=st.none() | names,
    price=st.floats(0, 100),
    quota=st.dictionaries(names, st.integers(0, 100), max_size=3),
)
def test_a_cluster_survives_json(count, state, labels, start_s, tenant, price, quota):
    node = Node(name="n", kind="h200", num_devices=count, state=state, labels=labels, withheld=(0,))
    reservation = Reservation(
        node="n", num_devices=1, start_s=start_s, end_s=2 * start_s + 1, tenant=tenant
    )
    cluster = ClusterSpec(
        nodes=(node,), reservations=(reservation,), price_per_hour={"h200": price}, quota=quota
    )
    assert loads(dumps(cluster), ClusterSpec) == cluster
    assert node.num_usable == count - 1


@pytest.mark.parametrize(
    "value",
    [
        Shape("h200", 2, 16),
        Node(name="n", kind="a", num_devices=0),
        JobSpec(id="x"),
        JobSpec(
            id="x", mode="rigid", num_devices=3, kinds=("a", "b"), level="rack", deadline_s=5.5
        ),
        Allocation(),
        Allocation(devices={"n0": (0, 2), "n1": (7,)}, generation=4, share_group="g"),
    ],
)
def test_every_type_survives_json(value):
    assert loads(dumps(value), type(value)) == value
    assert json.loads(dumps(value))["version"] == 1
    assert "\n" in dumps(value, indent=1)


def test_missing_fields_have_their_defaults_and_whole_numbers_are_numbers():
    spec = loads('{"version": 1, "id": "x", "weight": 2}', JobSpec)
    assert spec == JobSpec(id="x", weight=2.0) and isinstance(spec.weight, float)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "not JSON: .* line 1, column 2"),
        ("[]", "expected a JSON object with the fields of a JobSpec"),
        ('{"id": "x"}', "version None"),
        ('{"version": 2, "id": "x"}', "version 2, this program reads version 1"),
        ('{"version": 1, "type": "Node", "id": "x"}', "expected a JobSpec, got a Node"),
        ('{"version": 1}', "JobSpec lacks the field 'id'"),
        ('{"version": 1, "id": "x", "max_device": 4}', "JobSpec has no field 'max_device'"),
        (
            '{"version": 1, "id": "x", "max_devices": "4"}',
            "JobSpec.max_devices is '4'; .* a whole number",
        ),
        ('{"version": 1, "id": "x", "max_devices": true}', "JobSpec.max_devices is True"),
        (
            '{"version": 1, "id": "x", "max_devices": 0}',
            "JobSpec is not valid: job 'x' has min_devices=1",
        ),
        ('{"version": 1, "id": "x", "mode": "stiff"}', "must be one of .*'rigid'"),
        (
            '{"version": 1, "id": "x", "kinds": "h200"}',
            "JobSpec.kinds is 'h200'; it must be a list",
        ),
        ('{"version": 1, "id": "x", "kinds": ["a", 1]}', r"JobSpec.kinds\[1\] is 1"),
    ],
)
def test_bad_json_names_the_field(text, words):
    with pytest.raises(ValueError, match=words):
        loads(text, JobSpec)


def test_bad_json_within_a_mapping_or_a_list_names_the_path():
    text = dumps(ClusterSpec(nodes=(Node(name="n", kind="a", num_devices=1),), quota={"t": 1}))
    with pytest.raises(ValueError, match=r"ClusterSpec.quota\['t'\] is 1.5"):
        loads(text.replace('"t": 1', '"t": 1.5'), ClusterSpec)
    with pytest.raises(
        ValueError, match=r"ClusterSpec.nodes\[0\] is not valid: node 'n' has num_devices=-1"
    ):
        loads(text.replace('"num_devices": 1', '"num_devices": -1'), ClusterSpec)
    with pytest.raises(ValueError, match=r"ClusterSpec.nodes\[0\].labels is \[\]; .* an object"):
        loads(text.replace('"labels": {}', '"labels": []'), ClusterSpec)


NODE = Node(name="n", kind="a", num_devices=4)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: ClusterSpec(nodes=()), "at least one node"),
        (lambda: ClusterSpec(nodes=(NODE, NODE)), r"nodes \['n'\] occur more than once"),
        (lambda: dataclasses.replace(NODE, num_devices=-1), "num_devices=-1"),
        (lambda: dataclasses.replace(NODE, withheld=(4,)), "indices from 0 to 3"),
        (lambda: dataclasses.replace(NODE, withheld=(1, 1)), "different local indices"),
        (lambda: ClusterSpec(nodes=(NODE,), quota={"t": -1}), "quota=-1"),
        (
            lambda: ClusterSpec(nodes=(NODE,), price_per_hour={"a": float("nan")}),
            "price_per_hour=nan",
        ),
        (lambda: ClusterSpec(nodes=(NODE,), reservations=(reserved("n", 5),)), "which has 4"),
        (lambda: ClusterSpec(nodes=(NODE,), reservations=(reserved("m", 1),)), "not one of the"),
        (lambda: reserved("n", -1), "num_devices=-1"),
        (lambda: reserved("n", 1, end_s=-1.0), "must end after it starts"),
        (lambda: Shape("a", 0, 1), "at least one node"),
        (lambda: Shape("a", 2, 1), "one device on each"),
        (lambda: JobSpec(id="x", mode="rigid"), "is rigid but has no num_devices"),
        (lambda: JobSpec(id="x", mode="rigid", num_devices=0), "num_devices=0"),
        (lambda: JobSpec(id="x", min_devices=4, max_devices=2), "min_devices=4 and max_devices=2"),
        (lambda: JobSpec(id="x", min_devices=0), "1 <= min_devices"),
        (lambda: JobSpec(id="x", weight=0.0), "weight=0.0"),
        (lambda: JobSpec(id="x", min_run_s=-1.0), "min_run_s=-1.0"),
        (lambda: JobSpec(id="x", kinds=()), "allows no kind"),
        (lambda: Allocation(devices={"n": ()}), "a node without any is left out"),
        (lambda: Allocation(devices={"n": (1, 1)}), "different"),
        (lambda: Allocation(devices={"n": (-1,)}), "0 or more"),
    ],
)
def test_what_cannot_be_is_an_error(make, words):
    with pytest.raises(ValueError, match=words):
        make()


def reserved(node: str, num_devices: int, *, end_s: float = 10.0) -> Reservation:
    return Reservation(node=node, num_devices=num_devices, start_s=0.0, end_s=end_s)
