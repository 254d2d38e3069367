"""The pictures of simulations show what happened, for many jobs, kinds and policies."""

import io

import numpy as np
import pytest
from simulated import Shuffle, cluster, truth, workload

from jaxgoodput.cluster.simulate.pictures import completion_png, gantt_png
from jaxgoodput.cluster.simulate.records import Interval, JobRecord, Result
from jaxgoodput.cluster.simulate.settings import Settings
from jaxgoodput.cluster.simulate.simulator import simulate, uniform_cluster

image = pytest.importorskip("matplotlib.image")


def pixels(png: bytes) -> np.ndarray:
    assert png.startswith(b"\x89PNG")
    return (np.asarray(image.imread(io.BytesIO(png)))[..., :3] * 255).round().astype(int)


def share(picture: np.ndarray, colour: tuple[int, int, int]) -> float:
    return float((np.abs(picture - colour).max(-1) < 12).mean())


BLUE, ORANGE, GREY = (0, 114, 178), (230, 159, 0), (140, 140, 140)


def record(i, application, start_s, end_s, devices, submit_s=0.0):
    start_s, end_s = float(start_s), float(end_s)
    stay = Interval(start_s=start_s, end_s=end_s, kind="t4", devices=devices)
    seconds = {"t4": stay.num_devices * (end_s - start_s)}
    return JobRecord(
        id=f"job-{i}", application=application, submit_s=submit_s, start_s=start_s, finish_s=end_s,
        restarts=0, device_s=seconds, intervals=(stay,), rho=1.0,
    )  # fmt: skip


def result(jobs, policy="p"):
    return Result(policy=policy, jobs=tuple(jobs), decision_s=(0.001,))


def test_the_area_of_a_colour_is_the_device_time_of_its_application():
    two = uniform_cluster("t4", 2, 4)
    one, other = "t4-000", "t4-001"
    every = (0, 1, 2, 3)
    jobs = [record(0, "a", 0, 3600, {one: every}), record(1, "b", 0, 1800, {other: every})]
    picture = pixels(gantt_png(result(jobs), two))
    assert share(picture, BLUE) > 0.2
    assert share(picture, BLUE) / share(picture, ORANGE) == pytest.approx(2.0, rel=0.1)
    assert share(picture, GREY) < 0.01


def test_many_applications_share_the_last_colour():
    four = uniform_cluster("t4", 4, 4)
    jobs = [
        record(i, f"app-{i:02d} (batch size {i})", 0, 3600, {f"t4-{i // 4:03d}": (i % 4,)})
        for i in range(16)
    ]
    picture = pixels(gantt_png(result(jobs), four))
    assert share(picture, GREY) > 4 * share(picture, BLUE) > 0


def test_a_simulation_is_drawn_the_same_twice():
    found = simulate(
        workload(6), cluster(), Shuffle(), truth(), settings=Settings(), name="shuffle"
    )
    first = gantt_png(found, cluster(), title="six jobs")
    assert first == gantt_png(found, cluster(), title="six jobs")
    assert pixels(first).shape == (744, 1320, 3)


def test_completion_times_of_many_policies_are_told_apart():
    rng = np.random.default_rng(0)
    many = [
        result(
            [record(i, "a", 0, float(s), {"t4-000": (0,)}) for i, s in enumerate(times)],
            f"policy-{p}",
        )
        for p, times in enumerate(rng.lognormal(8.0, 1.5, (9, 160)))
    ]
    picture = pixels(completion_png(many))
    assert share(picture, BLUE) > 1e-3 and share(picture, ORANGE) > 1e-3


@pytest.mark.parametrize("seconds", [[5.0], [600.0, 601.0]])
def test_few_jobs_of_one_length_can_be_drawn(seconds):
    jobs = [record(i, "a", 0, s, {"t4-000": (i,)}) for i, s in enumerate(seconds)]
    assert pixels(completion_png([result(jobs)])).std() > 0
