"""From what a user allows to what can run: plans keep to data, devices and memory, whoever asks."""

import dataclasses

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from jaxgoodput.goodput.memory import StepBytes, TooLarge
from jaxgoodput.goodput.search import BatchConfig, BatchLimits
from jaxgoodput.tune.plan import BatchPlan, Indivisible, batch_plan

MANY = 10**9  # samples, or bytes: as many as anyone could want


def linear(state, per_sample):
    """What a step needs where memory grows with the size; accumulating holds another gradient."""

    def needs(size, accumulate):
        held = state + accumulate * state // 4
        return StepBytes(arguments=held, outputs=7, temporaries=per_sample * size)

    return needs


NOTHING = linear(0, 0)


# Limits that a user may write, with replicas that can divide the base; as numbers, made in the tests.
allowances = st.fixed_dictionaries(
    {
        "num_replicas": st.sampled_from([1, 2, 4, 8]),
        "share": st.integers(1, 64),  # of a replica in the base batch
        "growth": st.integers(1, 16),
        "low": st.none() | st.integers(1, 8),
        "span": st.integers(0, 512),
        "floor": st.none() | st.floats(0, 1),  # of the base
        "max_micro_batches": st.sampled_from([1, 2, 16]),
        "sizes": st.none() | st.sets(st.integers(1, 64), max_size=5),
    }
)


def limits_of(allowance):
    base = allowance["num_replicas"] * allowance["share"]
    low, floor = allowance["low"], allowance["floor"]
    micro = None if low is None else (low, low + allowance["span"])
    least, most = micro or (1, base * allowance["growth"])
    sizes = sorted(size for size in allowance["sizes"] or () if least <= size <= most)
    return BatchLimits(
        base=base,
        max=base * allowance["growth"],
        micro=micro,
        sizes=tuple(sizes) or None,
        min_global=None if floor is None else max(int(floor * base), 1),
        max_micro_batches=allowance["max_micro_batches"],
    )


needs = st.builds(linear, st.integers(0, 10**6), st.integers(0, 10**4))


@example(
    allowance={
        "num_replicas": 1,
        "share": 1,
        "growth": 15,
        "low": 2,
        "span": 13,
        "floor": None,
        "max_micro_batches": 1,
        "sizes": {3},
    },
    num_samples=2,
    needs=NOTHING,
    budget=7,
    accumulate=False,
    fixed=False,
)
@given(
    allowance=allowances,
    num_samples=st.integers(1, 20_000),
    needs=needs,
    budget=st.integers(0, 10**7),
    accumulate=st.booleans(),
    fixed=st.booleans(),
)
def test_a_plan_never_leaves_its_limits(allowance, num_samples, needs, budget, accumulate, fixed):
    limits, num_replicas = limits_of(allowance), allowance["num_replicas"]
    asked = {}

    def noted(size, several):
        asked[size, several] = need = needs(size, several)
        return need

    try:
        plan = batch_plan(
            limits,
            num_replicas,
            num_samples,
            budget=budget,
            needs=noted,
            accumulate=accumulate,
            fixed=fixed,
            strategy="data8",
        )
    except ValueError as refusal:  # of which TooLarge and Indivisible are two
        assert limits.base > num_samples or isinstance(refusal, TooLarge | Indivisible)
        return
    start, most = plan.start, limits.max_micro_batches
    assert start.global_batch_size == limits.base <= num_samples
    assert start.num_replicas == num_replicas and start.strategy == "data8"
    assert start.num_micro_batches == 1 or (accumulate and start.num_micro_batches <= most)
    assert asked[start.micro_batch_size, start.num_micro_batches > 1].peak <= budget
    assert limits.micro is None or start.micro_batch_size <= limits.micro[1]
    assert plan.accumulate == (accumulate and most > 1)
    assert start.micro_batch_size in plan.sizes and list(plan.sizes) == sorted(set(plan.sizes))
    assert plan.sizes == (start.micro_batch_size,) or not fixed
    if limits.sizes is not None and not fixed:
        least, largest = plan.limits.span
        of_the_user = {*limits.sizes, start.micro_batch_size}
        if any(least <= size <= largest for size in of_the_user):
            assert set(plan.sizes) <= of_the_user
        else:
            assert len(plan.sizes) == 2 and least <= plan.sizes[-1] <= largest
    for batch in plan.batches(plan.sizes):
        assert batch.micro_batch_size in plan.sizes
        assert batch.num_micro_batches == 1 or plan.accumulate
        if not fixed:
            assert limits.smallest <= batch.global_batch_size <= min(limits.max, num_samples)


@given(allowance=allowances, needs=needs, low=st.integers(0, 10**7), more=st.integers(0, 10**7))
def test_more_memory_never_takes_more_micro_batches(allowance, needs, low, more):
    limits, num_replicas = limits_of(allowance), allowance["num_replicas"]

    def start(budget):
        try:
            plan = batch_plan(limits, num_replicas, MANY, budget=budget, needs=needs)
        except (TooLarge, Indivisible):
            return None
        return plan.start

    small, large = start(low), start(low + more)
    if small is not None:
        assert large is not None and large.num_micro_batches <= small.num_micro_batches


def test_a_base_batch_that_does_not_fit_is_accumulated():
    limits = BatchLimits(base=64, max=256, micro=(1, 256))
    needs = linear(1000, 100)
    whole = batch_plan(limits, 1, 300, budget=MANY, needs=needs)
    assert (whole.start.micro_batch_size, whole.start.num_micro_batches) == (64, 1)
    small = batch_plan(limits, 1, 300, budget=3000, needs=needs)
    assert (small.start.micro_batch_size, small.start.num_micro_batches) == (16, 4)
    assert needs(16, True).peak <= 3000 < needs(32, True).peak


def test_memory_never_leads_beyond_the_limits():
    needs, limits = linear(1000, 100), BatchLimits(base=64, max=256, micro=(1, 256))
    two = dataclasses.replace(limits, max_micro_batches=2)
    with pytest.raises(Indivisible, match="at most 2 of at most .*max_micro_batches"):
        batch_plan(two, 1, 300, budget=3000, needs=needs)
    with pytest.raises(
        TooLarge, match="a step with .* samples per replica needs .* Raise execution.memory"
    ):
        batch_plan(limits, 1, 300, budget=100, needs=needs)
    with pytest.raises(TooLarge, match="allow accumulation"):
        batch_plan(limits, 1, 300, budget=3000, needs=needs, accumulate=False)


def test_a_plan_asks_only_for_sizes_that_it_may_start_with():
    """What it asks for is compiled: the base, one sample to tell its bytes apart, and what then fits."""
    asked, model = [], linear(1000, 100)

    def needs(size, accumulate):
        asked.append(size)
        return model(size, accumulate)

    limits = BatchLimits(base=64, max=256, micro=(1, 256))
    batch_plan(limits, 1, 300, budget=MANY, needs=needs)
    assert asked == [64]
    asked.clear()
    batch_plan(limits, 1, 300, budget=3000, needs=needs)
    assert asked[:2] == [64, 1] and set(asked[2:]) <= {size for size in asked if size < 64}


def test_sizes_that_are_too_large_for_more_replicas_are_left_out():
    """The byte LM's sizes, given for one device, in a job that gets a second one."""
    limits = BatchLimits(base=16, max=64, sizes=(16, 32, 64), max_micro_batches=1)
    sizes = {n: batch_plan(limits, n, 300, budget=MANY, needs=NOTHING).sizes for n in (1, 2, 4, 8)}
    assert sizes == {1: (16, 32, 64), 2: (8, 16, 32), 4: (4, 16), 8: (2,)}


def test_a_data_set_bounds_the_batch():
    limits = BatchLimits(base=16, max=512, micro=(2, 512))
    assert batch_plan(limits, 8, 96, budget=MANY, needs=NOTHING).limits.max == 96
    with pytest.raises(ValueError, match="base batch of 16 .* data set of 10.*smaller batch.base"):
        batch_plan(limits, 8, 10, budget=MANY, needs=NOTHING)


def test_a_fixed_batch_has_one_size_and_may_miss_its_base_by_the_tolerance():
    limits = BatchLimits(base=17, max=64, micro=(1, 64), sizes=(16, 32, 64))
    with pytest.raises(Indivisible, match="16 and 24"):
        batch_plan(limits, 8, 96, budget=MANY, needs=NOTHING, fixed=True)
    plan = batch_plan(limits, 8, 96, budget=MANY, needs=NOTHING, fixed=True, tolerance=0.1)
    assert plan.start.global_batch_size == 16 and plan.sizes == (2,)


# -- a run that goes on ------------------------------------------------------------------------------


# A batch saved on some number of replicas, of the size at a place among those of the plan.
saves = st.fixed_dictionaries(
    {
        "place": st.integers(0, 100),
        "num_micro_batches": st.integers(1, 4),
        "num_replicas": st.sampled_from([1, 2, 4, 8]),
    }
)


def resumption(allowance, save):
    """A plan, and a batch that was saved under the same limits."""
    limits = limits_of({**allowance, "low": None})
    plan = batch_plan(
        limits, allowance["num_replicas"], MANY, budget=MANY, needs=NOTHING, strategy="fsdp8"
    )
    saved = BatchConfig(
        micro_batch_size=plan.sizes[save["place"] % len(plan.sizes)],
        num_micro_batches=save["num_micro_batches"],
        num_replicas=save["num_replicas"],
        strategy="data8",
    )
    return plan, saved


@given(allowance=allowances, save=saves, room=st.integers(1, 2048))
def test_a_resumed_run_goes_on_with_the_same_batch_where_it_can(allowance, save, room):
    plan, saved = resumption(allowance, save)
    found = plan.resumed(saved, lambda size: size <= room)
    assert found.strategy == "fsdp8" and found.num_replicas == plan.start.num_replicas
    assert found.micro_batch_size <= max(room, plan.start.micro_batch_size)
    same = dataclasses.replace(saved, num_replicas=found.num_replicas, strategy="fsdp8")
    can = plan.accumulate or saved.num_micro_batches == 1
    if can and saved.num_replicas == found.num_replicas and saved.micro_batch_size <= room:
        assert found == same
    if found not in (plan.start, same):
        assert found in plan.batches(plan.sizes)


@pytest.mark.parametrize("room, micro", [(64, 64), (16, 16), (8, 8)])
def test_a_run_saved_with_more_memory_resumes_with_what_fits(room, micro):
    start = BatchConfig(micro_batch_size=8, num_micro_batches=1, num_replicas=2)
    limits = BatchLimits(base=16, max=128, max_micro_batches=4)
    plan = BatchPlan(start=start, sizes=(8, 16, 32, 64), limits=limits, accumulate=True)
    saved = dataclasses.replace(start, micro_batch_size=64)
    asked = []

    def fits(size):
        asked.append(size)
        return size <= room

    found = plan.resumed(saved, fits)
    assert found.micro_batch_size == micro and asked == [s for s in (64, 32, 16) if s >= micro]
    assert found.global_batch_size == min(128, micro * 4 * 2), "the nearest batch that can be made"


@given(allowance=allowances, save=saves, wanted=st.integers(1, 10**6))
def test_the_nearest_batch_of_a_size_is_the_nearest_of_those_allowed(allowance, save, wanted):
    plan, saved = resumption(allowance, save)
    options = plan.batches([saved.micro_batch_size])
    found = plan.nearest(saved.micro_batch_size, wanted)
    if found is None:
        assert not options
        return

    def ratio(batch):
        return max(batch.global_batch_size / wanted, wanted / batch.global_batch_size)

    assert found in options and ratio(found) == pytest.approx(min(map(ratio, options)))
