"""What is read from a compiled program, and that the batch is followed before the parameters."""

import math

import jax
import jax.numpy as jnp
import optax
import pytest
from engines import DIM, make
from hypothesis import given
from hypothesis import strategies as st
from jax.experimental.compilation_cache import compilation_cache

from jaxgoodput.engine.analysis.analysis import compiled_analysis, num_kernels
from jaxgoodput.engine.analysis.collectives import collective_uses
from jaxgoodput.engine.analysis.names import Argument, readable
from jaxgoodput.engine.analysis.peak import peak_memory
from jaxgoodput.engine.analysis.program_text import program_text
from jaxgoodput.engine.arithmetic import elementary_work, matrix_flops, matrix_flops_by_type
from jaxgoodput.goodput.memory import StepBytes
from jaxgoodput.parallel.strategy import Strategy

WIDTH, LAYERS = 64, 6
SAMPLE = {"code": jax.ShapeDtypeStruct((16,), jnp.int32)}


def init(key):
    keys = jax.random.split(key, 3)
    return {
        "embed": jax.random.normal(keys[0], (4 * WIDTH, WIDTH)),
        "up": {"kernel": jax.random.normal(keys[1], (LAYERS, WIDTH, 4 * WIDTH))},
        "down": {"kernel": jax.random.normal(keys[2], (LAYERS, 4 * WIDTH, WIDTH))},
    }


def layer(x, p):
    return x + jnp.tanh(x @ p["up"]["kernel"]) @ p["down"]["kernel"], None


def loss(params, batch, key):
    """Nothing in it says how an activation is cut, and its embedding is cut over features."""
    x = params["embed"][batch["code"]]
    layers = {name: params[name] for name in ("up", "down")}
    x, _ = jax.lax.scan(jax.checkpoint(layer), x, layers)
    return jnp.mean(x**2, axis=(1, 2))


def analysed(strategy, size=4, nodes=None):
    engine = make(
        loss,
        init=init,
        tx=optax.adam(1e-3),
        strategy=strategy,
        sample=SAMPLE,
        preconditioned=False,
    )
    program = engine.programs.step(engine.shape(size), measure=False)
    return compiled_analysis(program, nodes or [0] * engine.layout.num_devices)


MODEL_BYTES = 4 * (4 * WIDTH * WIDTH + LAYERS * 8 * WIDTH * WIDTH)


@pytest.fixture(scope="module", autouse=True)
def compiled_anew():
    """The compiler says what it keeps in memory while it compiles, and not when JAX's cache answers."""
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    yield
    jax.config.update("jax_enable_compilation_cache", True)
    compilation_cache.reset_cache()


@pytest.fixture(scope="module")
def fsdp8(compiled_anew):
    return analysed(Strategy(fsdp=8))


def test_arithmetic_counts_every_layer_of_a_scan(fsdp8):
    forward = 2 * LAYERS * 2 * (8 * 4 * 16) * WIDTH * 4 * WIDTH
    # Forward, again for the backward pass, and twice in it; but for what the last layer need not redo.
    assert fsdp8.flops == pytest.approx(4 * forward, rel=0.15)


def test_arithmetic_is_that_of_all_devices_under_every_layout(fsdp8):
    """Each replica of data parallelism traces its own part, a cut model the whole."""
    assert analysed(Strategy(data=8)).flops == pytest.approx(fsdp8.flops)


def test_fsdp_sends_the_model_and_not_its_activations(fsdp8):
    """Forward, backward, and gradients: three times the model, if the batch is followed first.

    XLA:CPU reduces with all-reduce, which counts twice, where an accelerator scatters.
    """
    sent = sum(fsdp8.traffic.values())
    assert 2 * MODEL_BYTES < sent < 4.5 * MODEL_BYTES
    assert fsdp8.bytes.arguments < 3.1 * MODEL_BYTES / 8 + 2**14
    # A larger batch sends no more.
    assert sum(analysed(Strategy(fsdp=8), size=16).traffic.values()) == pytest.approx(sent, rel=0.1)


def test_traffic_in_a_loop_counts_as_often_as_it_runs():
    text = """
%body (p: (s32[], f32[8])) -> (s32[], f32[8]) {
  %x = f32[8]{0} all-gather(f32[2]{0} %p), channel_id=1, replica_groups=[2,4]<=[8], dimensions={0}
}
%condition (p: (s32[], f32[8])) -> pred[] {
  %limit = s32[] constant(5)
  ROOT %less = pred[] compare(%i, %limit), direction=LT
}
ENTRY %main (a: f32[2]) -> f32[8] {
  %loop = (s32[], f32[8]) while(%t), condition=%condition, body=%body
  %y = f32[8]{0} all-reduce(f32[8]{0} %q), channel_id=2, replica_groups={{0,1,2,3,4,5,6,7}}, to_apply=%add
}
"""
    found = {use.kind: use.received.total for use in collective_uses(program_text(text), [0] * 8)}
    assert found == {"all-gather": 5 * 192 / 8, "all-reduce": 2 * 32 * 7 / 8}


@given(trips=st.lists(st.integers(1, 9), min_size=1, max_size=4), kernels=st.integers(1, 3))
def test_kernels_of_loops_in_loops_count_as_often_as_they_run(trips, kernels):
    def loop(depth):
        times = f'backend_config={{"known_trip_count":{{"n":"{trips[depth]}"}}}}'
        return f"  %w{depth} = f32[8]{{0}} while(%p), condition=%c, body=%body{depth}, {times}"

    lines, expected = [], 0
    for depth in range(len(trips)):
        expected += math.prod(trips[: depth + 1]) * kernels
        lines += [f"%body{depth} (p: f32[8]) -> f32[8] {{", "  %p = f32[8]{0} parameter(0)"]
        lines += [f"  %f{depth}.{i} = f32[8]{{0}} fusion(%p), calls=%in" for i in range(kernels)]
        lines += [loop(depth + 1)] if depth + 1 < len(trips) else []
        lines.append("}")
    lines += ["%in (x: f32[8]) -> f32[8] {", "  ROOT %exp = f32[8]{0} exponential(%x)", "}"]
    lines += ["ENTRY %main (p: f32[8]) -> f32[8] {", loop(0), "}"]
    assert num_kernels(program_text("\n".join(lines))) == expected


# As XLA's compiler for NVIDIA GPUs prints it, for 8 H100s on two nodes; shortened.
ON_GPUS = """
%body (param.2: (s32[], f32[6,8,256])) -> (s32[], f32[6,8,256]) {
  %param.2 = (s32[], f32[6,8,256]{2,1,0}) parameter(0), metadata={scheduling_name="param.2"}
  %gte = f32[6,8,256]{2,1,0} get-tuple-element(%param.2), index=1
  %i = s32[] get-tuple-element(%param.2), index=0
  %slice = f32[8,256]{1,0} fusion(%gte, %i), kind=kLoop, calls=%sliced
  %all-gather-start = (f32[8,256]{1,0}, f32[64,256]{1,0}) all-gather-start(%slice), channel_id=1, \
replica_groups=mesh['axis_0'=8,'axis_1'=1] {'axis_0'}, dimensions={0}, use_global_device_ids=true, \
metadata={op_name="jit(run)/jvp()/while/body/mlp/dot_general" stack_frame_id=2}, \
backend_config={"collective_backend_config":{"is_sync":true,"backend":"DEFAULT"}}
  %all-gather-done = f32[64,256]{1,0} all-gather-done(%all-gather-start)
  %gemm = f32[64,256]{1,0} fusion(%all-gather-done, %all-gather-done), kind=kCustom, calls=%product, \
metadata={op_name="jit(run)/transpose(jvp())/while/body/checkpoint/mlp/dot_general" stack_frame_id=2}
  %reduce-scatter-start = ((f32[64,256]{1,0}), f32[8,256]{1,0}) reduce-scatter-start(%gemm), channel_id=24, \
replica_groups=mesh['axis_0'=1,'axis_1'=8] {'axis_1'}, use_global_device_ids=true, dimensions={0}, \
to_apply=%add, backend_config={"collective_backend_config":{"is_sync":false}}
  %fusion.9 = f32[64,256]{1,0} fusion(%gemm), kind=kLoop, calls=%product
  %reduce-scatter-done = f32[8,256]{1,0} reduce-scatter-done(%reduce-scatter-start)
  ROOT %tuple = (s32[], f32[6,8,256]{2,1,0}) tuple(%i, %gte)
}

%sliced (p: f32[6,8,256], j: s32[]) -> f32[8,256] {
  %p = f32[6,8,256]{2,1,0} parameter(0)
  %j = s32[] parameter(1)
  ROOT %ds = f32[8,256]{1,0} dynamic-slice(%p, %j, %j, %j), dynamic_slice_sizes={1,8,256}
}

%product (q: f32[64,256]) -> f32[64,256] {
  %q = f32[64,256]{1,0} parameter(0)
  ROOT %dot.1 = f32[64,256]{1,0} dot(%q, %q), lhs_contracting_dims={1}
}

ENTRY %main (param.8: f32[6,8,256], param.15: f32[6,8,256]) -> f32[6,8,256] {
  %param.8 = f32[6,8,256]{2,1,0} parameter(0), metadata={op_name="state.params[\\'up\\'][\\'kernel\\']"}
  %param.15 = f32[6,8,256]{2,1,0} parameter(1), \
metadata={op_name="state.opt_state.inner[0].mu[\\'up\\'][\\'kernel\\']"}
  %param.6 = s32[4,16]{1,0} parameter(2), metadata={op_name="inputs[0][\\'code\\']"}
  %zero = s32[] constant(0)
  %copied = f32[6,8,256]{2,1,0} copy(%param.8)
  %carried = (s32[], f32[6,8,256]{2,1,0}) tuple(%zero, %copied)
  %while = (s32[], f32[6,8,256]{2,1,0}) while(%carried), condition=%c, body=%body, \
backend_config={"known_trip_count":{"n":"6"}}
  ROOT %out = f32[6,8,256]{2,1,0} get-tuple-element(%while), index=1
}
"""
TABLES = """HloModule jit_run, is_scheduled=true

FileNames
1 "/site-packages/optax/base.py"
2 "/home/me/model.py"

FunctionNames
1 "update"
2 "layer"

FileLocations
1 {file_name_id=2 function_name_id=2 line=17 end_line=17 column=2 end_column=2}
2 {file_name_id=1 function_name_id=1 line=85 end_line=85 column=18 end_column=18}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=2}

"""
ALIVE = """
  Live ranges at 104 (peak):
    gemm{}: 65536 bytes (cumulative: 65536 bytes)
    param.15{}: 49152 bytes (cumulative: 114688 bytes)
    param.8{}: 49152 bytes (cumulative: 163840 bytes)
    while{1}: 49152 bytes (cumulative: 212992 bytes)
    all-gather-done{}: 65536 bytes (cumulative: 278528 bytes)
  Stack trace breakdown for peak usage: 278 528 bytes
"""


def test_a_program_for_gpus_is_read():
    program = program_text(TABLES + ON_GPUS)
    gathered, scattered = collective_uses(program, [0] * 4 + [1] * 4)
    # 7 of 8 parts arrive; the 4 parts of the other node cross once for its 4 devices.
    part = 8 * 256 * 4
    assert (gathered.received.total, gathered.received.between) == (6 * 7 * part, 6 * part)
    assert scattered.received == gathered.received
    assert gathered.times == scattered.times == 6
    assert gathered.is_exposed, "it is synchronous"
    assert not scattered.is_exposed, "a fusion runs before it ends"
    assert gathered.names == ("up/kernel",)
    assert scattered.names == ("backward mlp/dot_general (model.py:17)",)
    assert num_kernels(program) == 6 * 5 + 1


def test_a_collective_is_exposed_if_nothing_runs_between_its_start_and_its_end():
    lines = ON_GPUS.splitlines()
    (between,) = [i for i, line in enumerate(lines) if "%fusion.9 =" in line]
    program = program_text("\n".join(lines[:between] + lines[between + 1 :]))
    assert all(use.is_exposed for use in collective_uses(program, [0] * 8))


def test_the_peak_of_a_program_for_gpus_is_told_by_kind_and_by_name():
    need = StepBytes(arguments=2 * 49_152 + 256, outputs=0, temporaries=200_000)
    peak = peak_memory(program_text(TABLES + ON_GPUS), need, ALIVE)
    assert (peak.parameters, peak.optimizer, peak.activations) == (49_152, 49_152, 256)
    assert peak.temporaries == 200_000
    named = {(one.name, one.kind, one.shape, one.size_bytes) for one in peak.buffers}
    assert named == {
        ("backward mlp/dot_general (model.py:17)", "temporaries", "f32[64,256]", 65_536),
        ("copy of up/kernel", "temporaries", "f32[64,256]", 65_536),
        ("copy of up/kernel", "temporaries", "f32[6,8,256]", 49_152),
        ("up/kernel", "parameters", "f32[6,8,256]", 49_152),
        ("mu of up/kernel", "optimizer", "f32[6,8,256]", 49_152),
        ("code", "activations", "s32[4,16]", 256),
    }


def test_what_a_compiler_does_not_tell_is_not_guessed():
    need = StepBytes(arguments=2 * 49_152 + 256, outputs=0, temporaries=200_000)
    peak = peak_memory(program_text(ON_GPUS), need, "")
    assert math.isnan(peak.activations) and peak.temporaries == 200_256
    assert {one.kind for one in peak.buffers} == {"parameters", "optimizer", "activations"}


def test_kinds_of_memory_add_up_and_are_those_of_the_layout(fsdp8):
    peak, need = fsdp8.peak, fsdp8.bytes
    parts = peak.parameters + peak.optimizer + peak.activations + peak.temporaries
    assert parts == need.peak
    assert peak.parameters == MODEL_BYTES / 8, "every parameter is cut in 8"
    assert peak.optimizer == pytest.approx(2 * MODEL_BYTES / 8, abs=2**10)
    # What a scan keeps of each layer, 16 x 64 numbers for each sample.
    kept = LAYERS * 16 * WIDTH * 4
    larger = analysed(Strategy(fsdp=8), size=16).peak
    assert larger.parameters == peak.parameters
    assert peak.activations > 4 * kept and larger.activations > 16 * kept


def test_largest_buffers_and_collectives_have_the_users_names(fsdp8):
    sent = sorted(fsdp8.collectives, key=lambda use: -use.received.total)
    gathers = [use.names for use in sent if use.kind == "all-gather"][:4]
    assert {name for names in gathers for name in names} == {"up/kernel", "down/kernel"}
    held = {one.name for one in fsdp8.peak.buffers if one.kind == "optimizer"}
    assert {"mu of up/kernel", "nu of down/kernel", "nu of embed"} <= held
    assert any("test_analysis.py" in one.name for one in fsdp8.peak.buffers)


def test_what_crosses_between_nodes_depends_on_the_layout():
    nodes = [0] * 4 + [1] * 4
    outer = analysed(Strategy(data=2, fsdp=4), nodes=nodes).received
    alone = analysed(Strategy(data=8), nodes=[0] * 8).received
    assert alone.between == 0 < outer.between < outer.total


@pytest.mark.parametrize(
    ("path", "name", "is_parameter"),
    [
        ("state.params['layers']['up']['kernel']", "layers/up/kernel", True),
        ("state.params[0]", "0", True),
        ("state.opt_state.inner[0].mu['a']", "mu of a", False),
        ("state.opt_state.inner[0].count", "count", False),
        ("state.guard.skipped", "skipped", False),
        ("inputs[0]['tokens']", "tokens", False),
        ("inputs[1]", "1", False),
    ],
)
def test_arguments_have_names(path, name, is_parameter):
    assert Argument(path).name == name
    assert Argument(path).is_parameter == is_parameter


def test_scopes_of_several_operations_and_of_nested_transformations():
    together = "jit(run)/(reduce_sum:reduce_sum:jvp()/reduce_sum:jvp()/reduce_sum)"
    assert readable(together) == "update reduce_sum"
    remat = "jit(run)/transpose(jvp(mlp))/while/body/closed_call/checkpoint/(rematted_computation/a/dot:b)"
    assert readable(remat) == "backward mlp/a/dot"
    assert readable("jit(run)/min;jit(run)/vmap()/broadcast_in_dim") == "update min"


def test_products_are_counted_by_the_type_of_their_factors():
    def both(x, y):
        return (x @ x).astype(jnp.float32) @ y

    x = jax.ShapeDtypeStruct((4, 4), jnp.bfloat16)
    y = jax.ShapeDtypeStruct((4, 2), jnp.float32)
    jaxpr = jax.make_jaxpr(both)(x, y).jaxpr
    assert matrix_flops_by_type(jaxpr) == {"bfloat16": 2 * 64, "float32": 2 * 32}
    assert sum(matrix_flops_by_type(jaxpr).values()) == matrix_flops(jaxpr)


def test_products_convolutions_and_branches():
    def flops(function, *shapes):
        args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
        return matrix_flops(jax.make_jaxpr(function)(*args).jaxpr)

    assert flops(jnp.dot, (3, 4), (4, 5)) == 2 * 3 * 4 * 5
    image, kernel = (2, 8, 8, 3), (3, 3, 3, 16)
    convolution = flops(
        lambda x, k: jax.lax.conv_general_dilated(
            x, k, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        ),
        image,
        kernel,
    )
    assert convolution == 2 * 2 * 8 * 8 * 16 * 3 * 3 * 3
    either = flops(
        lambda x, y: jax.lax.cond(x[0, 0] > 0, lambda: x @ y, lambda: x @ y @ y), (4, 4), (4, 4)
    )
    assert either == 2 * 2 * 4**3
    sizes = jnp.array([2, 4])
    ragged = flops(lambda x, y: jax.lax.ragged_dot(x, y, sizes), (6, 4), (2, 4, 5))
    assert ragged == 2 * 6 * 4 * 5


@pytest.mark.parametrize(
    "kind", [{}, {"replicas": 2}, {"loss_kind": "global", "replicas": 4}, {"elastic": True}]
)
def test_the_arithmetic_of_a_sample_is_known_once_its_program_is_compiled(kind):
    engine = make(**kind)
    assert math.isnan(engine.tflops_per_sample(4))
    engine.compile([4], accumulate=False)
    # A product of DIM numbers forward, and one backward.
    assert engine.tflops_per_sample(4) == pytest.approx(4 * DIM / 1e12)


def test_elementary_work_counts_loops_branches_and_what_reductions_read():
    def work(function):
        return elementary_work(jax.make_jaxpr(function)(jnp.ones((3, 4))).jaxpr)

    assert work(lambda x: jnp.sin(x) + 1) == 24
    looped = work(lambda x: jax.lax.scan(lambda y, _: (jnp.sin(y), None), x, None, length=5)[0])
    assert looped == 5 * 12
    branch = work(lambda x: jax.lax.cond(x[0, 0] > 0, lambda: jnp.sin(jnp.cos(x)), lambda: x))
    assert 24 <= branch <= 30  # and the choice
    assert 12 <= work(jnp.sum) <= 13
    assert work(lambda x: jax.lax.while_loop(lambda y: y[0, 0] > 0, jnp.sin, x)) == math.inf
    pair = work(lambda x: jax.lax.reduce((x, x), (0.0, 0.0), lambda a, b: (a[0], b[1]), (1,)))
    assert pair >= 2 * 12
    for costly in (jnp.sort, jnp.cumsum, lambda x: jax.random.normal(jax.random.key(0), x.shape)):
        assert work(costly) >= 20 * 12


def test_a_convolution_whose_window_is_larger_than_its_input_counts_as_a_loop():
    def work(width):
        image, window = jnp.ones((1, width, width, 2)), jnp.ones((3, 3, 2, 2))
        traced = jax.make_jaxpr(
            lambda x, w: jax.lax.conv_general_dilated(
                x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
            )
        )(image, window)
        return elementary_work(traced.jaxpr) / (2 * width**2)

    assert work(4) == work(3) == 1 and work(2) > 9 * 2 * 20
