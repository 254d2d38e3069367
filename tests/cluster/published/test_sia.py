"""Sia's recorded rounds to the last digit; its rules about who moves."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxgoodput.cluster.published.sia import Sia, restart_factor, sia_terms, sia_utility
from jaxgoodput.cluster.scheduler.policy import JobView
from jaxgoodput.cluster.scheduler.solve.assignment import allocate
from jaxgoodput.specs import Allocation, ClusterSpec, JobSpec, Node, Shape


def rounds(folder, pattern):
    paths = sorted((folder / "gavel_sia").glob(pattern))
    assert paths
    return [json.loads(path.read_text()) for path in paths]


def as_matrices(data):
    """A recorded round as matrices: rigid jobs get shapes of their own size."""
    kinds = data["cluster_ordering"]
    adaptive, rigid = data["adaptive"], data["rigid"]
    shapes = [(kinds.index(kind), devices) for kind, _, devices in data["configs"]]
    first = {}
    for size in sorted(set(rigid["num_gpus"])):
        first[size] = len(shapes)
        shapes += [(k, size) for k in range(len(kinds))]
    offset = [first[size] for size in rigid["num_gpus"]]
    num_adaptive = len(adaptive["jobs"])
    goodput = np.full((num_adaptive + len(offset), len(shapes)), np.nan)
    for row, values in enumerate(adaptive["normalized_goodput"]):
        goodput[row, : len(values)] = values
    for row, (start, values) in enumerate(zip(offset, rigid["normalized_goodput"], strict=True)):
        goodput[num_adaptive + row, start : start + len(kinds)] = values
    present = [-1 if index is None else index for index in adaptive["prev_config"]]
    present += [
        -1 if kind is None else start + kind
        for start, kind in zip(offset, rigid["prev_type"], strict=True)
    ]
    return {
        "goodput": goodput,
        "factor": np.array(adaptive["restart_factor"] + rigid["restart_factor"], float),
        "present": np.array(present),
        "devices": np.array([devices for _, devices in shapes]),
        "kind": np.array([kind for kind, _ in shapes]),
        "capacity": np.array([data["cluster_total_gpus"][kind] for kind in kinds]),
        "pinned": np.array(adaptive["pinned"] + rigid["pinned"], bool),
    }


@pytest.mark.parametrize("pattern", ["sia_pneg_*.json", "sia_mix_*.json"])
def test_every_recorded_round_has_its_objective(golden, pattern):
    for data in rounds(golden, pattern):
        problem = as_matrices(data)
        power, idle_penalty = data["p"], data["lambda_n"]
        terms = sia_terms(
            problem["goodput"], problem["factor"], problem["present"], power=power, published=True
        )
        choice = allocate(
            sia_utility(terms, power=power, idle_penalty=idle_penalty),
            problem["devices"],
            problem["kind"],
            problem["capacity"],
            pinned=np.where(problem["pinned"], problem["present"], -1),
            relative_gap=0.0,
        )
        objective = idle_penalty * len(choice.shape) + np.sign(power) * choice.objective
        np.testing.assert_allclose(objective, data["reference_objective_highs"], rtol=1e-6)
        runs = choice.shape[choice.shape >= 0]
        used = np.bincount(
            problem["kind"][runs], problem["devices"][runs], len(problem["capacity"])
        )
        assert (used <= problem["capacity"]).all()
        pinned = problem["pinned"]
        assert (choice.shape[pinned] == problem["present"][pinned]).all()


@given(age=st.floats(0, 1e5), restarts=st.integers(0, 100), restart_s=st.floats(1.0, 300.0))
def test_the_factor_is_a_share_and_falls_with_restarts(age, restarts, restart_s):
    values = restart_factor(
        np.full(2, age), np.array([restarts, restarts + 1], float), np.full(2, restart_s)
    )
    assert ((values >= 0) & (values <= 1)).all()
    assert values[1] <= values[0]


CLUSTER = ClusterSpec(nodes=tuple(Node(name=f"n{i}", kind="k", num_devices=4) for i in range(2)))
SHAPES = [Shape("k", 1, 1), Shape("k", 1, 2), Shape("k", 1, 4), Shape("k", 2, 8)]


def view(id_, devices=None, **fields):
    return JobView(
        spec=JobSpec(id=id_),
        goodput={shape: shape.num_devices**0.9 for shape in SHAPES},
        allocation=Allocation(devices=devices or {}),
        since_s=0.0 if devices else None,
        **fields,
    )


def test_a_new_job_starts_smallest_and_grows_by_two():
    first = Sia()([view("new")], CLUSTER, 100.0)
    assert first.allocations["new"].num_devices == 1
    ran = view("ran", {"n0": (0,)}, largest_profiled=1)
    assert Sia()([ran], CLUSTER, 5000.0).allocations["ran"].num_devices == 2
    assert Sia(growth=None)([view("new")], CLUSTER, 100.0).allocations["new"].num_devices == 8


def test_a_restarting_job_stays_whatever_else_would_be_better():
    stays = view("a", {"n0": (0,)}, largest_profiled=8, restoring_until_s=5010.0)
    assert Sia()([stays], CLUSTER, 5000.0).allocations["a"] == stays.allocation
    assert Sia()([stays], CLUSTER, 5020.0).allocations["a"].num_devices == 8


def test_a_job_that_restarted_all_its_life_is_frozen_where_it_is():
    tired = view("a", {"n0": (0,)}, largest_profiled=8, num_restarts=100)
    assert Sia()([tired], CLUSTER, 1000.0).allocations["a"] == tired.allocation
