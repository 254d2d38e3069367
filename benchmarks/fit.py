"""Fits 180 synthetic profiles, and compares bad fits, extrapolation error and time with AdaptDL's.

    python benchmarks/fit.py

A fit is bad when its RMS log error on the steps it saw exceeds max(0.1, 3 x noise). The grid error
is the RMS log error over 28 noise-free configurations, most of them unseen. Profiles and AdaptDL's
results were recorded by running AdaptDL (README.md beside them).

The second table corrupts step times in the profiles with at least 12 rows: one of them by a factor of 20, or
a tenth of them (at least one) by a factor of 3. Without noise, expect a median grid error of at most
0.003 and 0.006.
"""

import json
import pathlib
import sys
import time

import numpy as np

from jaxgoodput.goodput.fit import PerfFit, StepTimings, fit_perf_params
from jaxgoodput.goodput.perf import PerfParams, Placement, step_time

GOLDEN = pathlib.Path(__file__).resolve().parents[2] / "shared" / "golden" / "adaptdl"
FIELDS = {
    "alpha_c": "compute_base",
    "beta_c": "compute_per_sample",
    "alpha_n": "inter_base",
    "beta_n": "inter_per_replica",
    "alpha_r": "intra_base",
    "beta_r": "intra_per_replica",
    "gamma": "overlap",
}


def timings_of(case: dict) -> StepTimings:
    missing = np.full(len(case["num_nodes"]), np.nan)
    return StepTimings(
        num_nodes=np.array(case["num_nodes"]),
        num_replicas=np.array(case["num_replicas"]),
        micro_batch_size=np.array(case["atomic_bsz"]),
        accumulate_s=np.array(case["accum_step_time"]),
        reduce_s=missing,
        update_s=missing,
        step_s=np.array(case["optim_step_time"]),
        weight=np.ones(len(missing)),
    )


def rms_log_error(perf: PerfParams, rows, measured_s) -> float:
    nodes, replicas, sizes = np.array(rows).T
    predicted = step_time(perf, Placement(num_nodes=nodes, num_replicas=replicas), sizes)
    return float(np.sqrt(np.mean((np.log(predicted) - np.log(measured_s)) ** 2)))


def grid_error(fit: PerfFit, case: dict, grid) -> float:
    truth = PerfParams(**{FIELDS[name]: value for name, value in case["true_params"].items()})
    nodes, replicas, sizes = np.array(grid).T
    exact = step_time(truth, Placement(num_nodes=nodes, num_replicas=replicas), sizes)
    # The grid asks about links that some profiles never saw.
    return rms_log_error(fit.explore(), grid, exact)


def measure(profiles: dict, priors) -> list[tuple[float, float, float, float, float]]:
    """(noise, error on the steps seen, grid error, ms, CPU ms) of every profile."""
    for case in profiles["cases"]:  # compile for every padded size
        if len(case["num_nodes"]) in (4, 28):
            fit_perf_params(timings_of(case), priors=priors)
    results = []
    for case in profiles["cases"]:
        timings = timings_of(case)
        rows = list(zip(case["num_nodes"], case["num_replicas"], case["atomic_bsz"], strict=True))
        start_s, start_cpu_s = time.perf_counter(), time.process_time()
        fit = fit_perf_params(timings, priors=priors)
        elapsed_ms = (time.perf_counter() - start_s) * 1e3
        cpu_ms = (time.process_time() - start_cpu_s) * 1e3
        seen = rms_log_error(fit.explore(), rows, case["optim_step_time"])
        grid = grid_error(fit, case, profiles["meta"]["grid"])
        results.append((case["noise"], seen, grid, elapsed_ms, cpu_ms))
    return results


def recorded(profiles: dict) -> list[tuple[float, float, float, float, float]]:
    """The same of AdaptDL, which recorded its CPU time only."""
    return [
        (
            case["noise"],
            case["adaptdl"]["in_sample_optim_rmsle"],
            case["adaptdl"]["grid_optim_rmsle"],
            np.nan,
            case["adaptdl"]["cpu_s"] * 1e3,
        )
        for case in profiles["cases"]
    ]


def spoilt(case: dict, share: float, factor: float, rng: np.random.Generator) -> dict:
    """A profile whose step times are too long by `factor`, that share of them and at least one."""
    step_s = np.array(case["optim_step_time"])
    count = max(1, round(share * len(step_s)))
    step_s[rng.choice(len(step_s), count, replace=False)] *= factor
    return {**case, "optim_step_time": step_s}


def show_outliers(profiles: dict) -> None:
    """Grid errors of fits to spoilt profiles."""
    large = [case for case in profiles["cases"] if len(case["num_nodes"]) >= 12]
    print(
        f"\n{'spoilt':22} {'noise':>6} {'profiles':>8} {'grid p50':>9} {'grid p90':>9} {'max':>7}"
    )
    for name, share, factor in (
        ("none", 0.0, 1.0),
        ("one x 20", 0.0, 20.0),
        ("10 % x 3", 0.1, 3.0),
    ):
        for noise in sorted({case["noise"] for case in large}):
            rng = np.random.default_rng(0)
            errors = []
            for case in large:
                if case["noise"] == noise:
                    fit = fit_perf_params(timings_of(spoilt(case, share, factor, rng)))
                    errors.append(grid_error(fit, case, profiles["meta"]["grid"]))
            print(
                f"{name:22} {noise:6.0%} {len(errors):8} {np.median(errors):9.4f} "
                f"{np.quantile(errors, 0.9):9.4f} {max(errors):7.4f}"
            )


def main() -> int:
    path = GOLDEN / "fit_profiles.json"
    if not path.is_file():
        print(f"skipped: the recorded profiles are not beside this checkout ({path})")
        return 0
    profiles = json.loads(path.read_text())
    table = {
        "ours": measure(profiles, "default"),
        "ours, priors=adaptdl": measure(profiles, "adaptdl"),
        "AdaptDL (recorded)": recorded(profiles),
    }
    print(
        f"{'fit':22} {'noise':>6} {'profiles':>8} {'bad':>4} {'grid p50':>9} {'grid p90':>9} "
        f"{'grid max':>9} {'median ms':>10} {'p90 ms':>8} {'median CPU ms':>14}"
    )
    for name, results in table.items():
        for noise in sorted({r[0] for r in results}):
            _, seen, grid, elapsed, cpu = np.array([r for r in results if r[0] == noise]).T
            bad = int(np.sum(seen > max(3 * noise, 0.1)))
            print(
                f"{name:22} {noise:6.0%} {len(seen):8} {bad:4} {np.median(grid):9.4f} "
                f"{np.quantile(grid, 0.9):9.4f} {grid.max():9.4f} {np.median(elapsed):10.1f} "
                f"{np.quantile(elapsed, 0.9):8.1f} {np.median(cpu):14.1f}"
            )
    show_outliers(profiles)
    return 0


if __name__ == "__main__":
    sys.exit(main())
