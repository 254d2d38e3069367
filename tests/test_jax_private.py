"""Each private JAX call does what is needed of it: a JAX version that changes one fails here."""

import contextlib
import signal
import socket
import textwrap
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax._src import cache_key, compiler, lru_cache
from jax._src import config as jax_config
from jax.sharding import PartitionSpec
from processes import run, start

from jaxgoodput import _jax
from jaxgoodput.clock import FakeClock


@pytest.fixture
def script(tmp_path):
    def write(body: str):
        path = tmp_path / "script.py"
        path.write_text(textwrap.dedent(body))
        return path

    return write


@pytest.fixture
def shared_cache():
    undo = _jax.share_compilation_cache()
    yield
    undo()


@pytest.mark.parametrize("version", ["0.10.0", "0.10.2", "0.11.0", "0.11.5.dev1", "0.12.0.1"])
def test_known_versions_are_accepted(version):
    _jax.require_known_version(version)


@pytest.mark.parametrize("version", ["0.9.2", "0.13.0", "1.10.0", "0.1.0"])
def test_an_unknown_version_is_named_with_the_remedy(version):
    with pytest.raises(RuntimeError, match=f"jax {version} is installed.*pip install"):
        _jax.require_known_version(version)


def test_the_installed_version_is_supported():
    _jax.require_known_version()


def test_nothing_is_computed_for_a_result_whose_cotangent_is_zero():
    def grads(x):
        (first, _), pull_back = jax.vjp(lambda x: (jnp.sin(x), jnp.tanh(x)), x)
        return pull_back((jnp.ones_like(first), _jax.zero_cotangent(first)))

    assert "tanh" not in str(jax.jit(grads).lower(1.0).compile().as_text())
    np.testing.assert_allclose(grads(1.0)[0], np.cos(1.0), rtol=1e-6)


def test_a_signal_knows_whether_the_main_thread_waits_for_xla():
    def deep(x):
        for _ in range(100):
            x = jnp.sin(x) @ x
        return x

    traced = jax.jit(jax.grad(lambda x: deep(x).sum())).trace(jnp.ones((8, 8)))
    seen: list[tuple[str, bool]] = []
    doing = "lowering"
    before = signal.signal(
        signal.SIGALRM, lambda number, frame: seen.append((doing, _jax.waits_for_xla(frame)))
    )
    signal.setitimer(signal.ITIMER_REAL, 0.005, 0.005)
    try:
        lowered = traced.lower()
        doing = "compiling"
        lowered.compile()
        doing = "done"
        deadline = time.monotonic() + 60.0
        while ("done", False) not in seen:
            assert time.monotonic() < deadline
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
    assert {("lowering", False), ("compiling", True), ("done", False)} <= set(seen)
    assert not {("lowering", True), ("done", True)} & set(seen)


# --- the coordination service -----------------------------------------------------------------


def _listens(address: str) -> bool:
    host, port = address.rsplit(":", 1)
    try:
        socket.create_connection((host, int(port)), timeout=5).close()
    except ConnectionRefusedError:
        return False
    return True


def test_services_listen_on_ports_of_their_own_until_shut_down():
    services = [_jax.start_coordination_service(2) for _ in range(3)]
    assert len({service.address for service in services}) == 3
    assert all(_listens(service.address) for service in services)
    for service in services:
        service.shutdown()
        service.shutdown()
        assert not _listens(service.address)


def test_a_taken_port_is_an_error_and_not_shared():
    service = _jax.start_coordination_service(2)
    try:
        with pytest.raises(OSError, match="Choose another port"):
            _jax.start_coordination_service(2, port=int(service.address.split(":")[1]))
    finally:
        service.shutdown()


def test_a_job_has_a_process():
    with pytest.raises(ValueError, match="at least one process"):
        _jax.start_coordination_service(0)


# --- connect ----------------------------------------------------------------------------------


def test_connect_after_devices_were_used_is_an_error():
    jax.devices()
    with pytest.raises(RuntimeError, match="already used its devices"):
        _jax.connect("127.0.0.1:1", 2, 0)


@pytest.mark.parametrize("process_id", [-1, 2])
def test_a_rank_outside_the_job_is_an_error(process_id):
    with pytest.raises(ValueError, match=r"not in \[0, 2\)"):
        _jax.connect("127.0.0.1:1", 2, process_id)


def test_nobody_at_the_address_is_an_error_after_the_time_limit():
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{closed.getsockname()[1]}"
        clock = FakeClock()
        with pytest.raises(ConnectionError, match=f"answers at {address} after 30 s.*launcher"):
            _jax._wait_until_listening(address, 30.0, clock)
    assert 30.0 <= clock.now() < 31.0


@pytest.mark.parametrize("address", ["", "host", ":1", "host:", "host:port"])
def test_a_malformed_address_is_an_error(address):
    with pytest.raises(ValueError, match="host:port"):
        _jax._wait_until_listening(address, 1.0, FakeClock())


WORLD = """
    import os, signal, jax
    from jaxgoodput import _jax
    store, rank = _jax.shared_store(), jax.process_index()
    print(f"absent={store.try_get('nobody/wrote/this')}")
    print(f"first={store.set('stop', str(rank))}")  # exactly one is first
    store.barrier("written", timeout_s=60)
    print(f"stop={store.get('stop', timeout_s=60)} {store.try_get('stop')}")
    store.barrier("read", timeout_s=60)
    if rank == 0:
        store.set("stop", "later", overwrite=True)
    store.barrier("overwritten", timeout_s=60)
    print(f"later={store.try_get('stop')}")
    for wait in (lambda: store.get("never", timeout_s=0.05),
                 lambda: store.barrier(f"alone{rank}", timeout_s=0.05)):
        try:
            wait()
        except TimeoutError as error:
            print(f"late: {error}")
    store.barrier("end", timeout_s=60)

    print(f"count={jax.process_count()} {len(jax.devices())} {len(jax.local_devices())}")
    print(f"handler={signal.getsignal(signal.SIGTERM) is signal.SIG_DFL}")
    try:
        _jax.connect("127.0.0.1:1", 2, 0)
    except RuntimeError as error:
        print(f"twice={'already connected' in str(error)}")
    _jax.forget_devices()
    _jax.forget_devices()
    print(f"after={jax.process_count()} {jax.process_index()} {len(jax.devices())}")
    print(f"usable={float(jax.numpy.ones(3).sum())}", flush=True)
    os.kill(os.getpid(), signal.SIGTERM)
"""


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """Two processes of three devices that have met, talked, and parted."""
    path = tmp_path_factory.mktemp("world") / "script.py"
    path.write_text(textwrap.dedent(WORLD))
    return run(path, 2, 3)


@pytest.mark.slow
@pytest.mark.multihost
def test_connect_makes_one_world_and_leaves_sigterm_to_python(world):
    assert world.code == 143, world
    for rank in range(2):
        assert world.value(rank, "count") == "2 6 3"
        assert world.value(rank, "handler") == "True"
        assert world.value(rank, "twice") == "True"
        assert world.value(rank, "after") == "1 0 3"
        assert world.value(rank, "usable") == "3.0"


GENERATIONS = """
    import pathlib, sys, time, jax, jax.numpy as jnp
    from jax.experimental import multihost_utils
    from jaxgoodput import _jax
    store = _jax.shared_store()
    rank, done = jax.process_index(), pathlib.Path(sys.argv[1])
    # The second generation's service lives in rank 2, which takes no part in it.
    if rank == 2:
        service = _jax.start_coordination_service(2)
        store.set("next", service.address)
    address = store.get("next", timeout_s=60)
    print(f"first={float(multihost_utils.process_allgather(jnp.float32(rank)).sum())}")
    store.barrier("first", timeout_s=60)
    _jax.forget_devices()
    if rank != 2:
        _jax.connect(address, 2, 1 - rank)
        total = multihost_utils.process_allgather(jnp.float32(10 * jax.process_index())).sum()
        print(f"second={float(total)} {jax.process_index()} of {jax.process_count()}")
        _jax.shared_store().barrier("second", timeout_s=60)
        _jax.forget_devices()
        (done / str(rank)).touch()
    else:
        while len(list(done.iterdir())) < 2:
            time.sleep(0.05)
        service.shutdown()
"""


@pytest.mark.slow
@pytest.mark.multihost
def test_a_process_may_leave_one_world_and_join_another(script, tmp_path):
    (tmp_path / "done").mkdir()
    end = run(script(GENERATIONS), 3, arguments=[str(tmp_path / "done")])
    assert end.code == 0, end
    assert [end.value(rank, "first") for rank in range(3)] == ["3.0"] * 3
    assert [end.value(rank, "second") for rank in range(2)] == ["10.0 1 of 2", "10.0 0 of 2"]


SURVIVOR = """
    import os, signal, time, jax
    from jaxgoodput import _jax
    from jaxgoodput.launcher import worker
    env = worker.WorkerEnv.from_environ(os.environ)
    _jax.forget_devices()  # and again, with a short heartbeat
    _jax.connect(env.coordinator, env.num_processes, env.process_id, heartbeat_timeout_s=2)
    _jax.shared_store().barrier("all", timeout_s=60)
    if env.process_id == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(4.5)
    print("alive", flush=True)
"""


@pytest.mark.slow
@pytest.mark.multihost
def test_the_death_of_rank_0_does_not_abort_the_others(script):
    # Past twice the heartbeat, and before the launcher ends the job.
    with start(script(SURVIVOR), 2) as job:
        assert "[1] alive" in job.wait_for("alive")
        assert job.wait().code == 137


# --- the shared store -------------------------------------------------------------------------


def test_a_process_alone_has_no_store():
    assert _jax.shared_store() is None


@pytest.mark.slow
@pytest.mark.multihost
def test_all_processes_read_what_one_wrote(world):
    first = [world.value(rank, "first") for rank in range(2)]
    assert sorted(first) == ["False", "True"]
    for rank in range(2):
        winner = str(first.index("True"))
        assert world.value(rank, "absent") == "None"
        assert world.value(rank, "stop") == f"{winner} {winner}"
        assert world.value(rank, "later") == "later"
        late = [line for line in world.lines(rank) if line.startswith("late:")]
        assert len(late) == 2
        assert "'never' within 0.05 s" in late[0]
        assert f"'alone{rank}' within 0.05 s" in late[1]


# --- Orbax over this client ---------------------------------------------------------------------

ORBAX = """
    import pathlib, sys, jax, jax.numpy as jnp, numpy as np
    import orbax.checkpoint as ocp
    from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

    folder = pathlib.Path(sys.argv[1])
    mesh = Mesh(np.array(jax.devices()), ("data",))
    values = {"split": (np.arange(12.0), P("data")), "whole": (np.float32(7.0), P())}

    def build(name):
        value, spec = values[name]
        return jax.make_array_from_callback(
            np.shape(value), NamedSharding(mesh, spec), lambda i: np.asarray(value)[i]
        )

    state = {name: build(name) for name in values}
    options = ocp.CheckpointManagerOptions(max_to_keep=2, save_interval_steps=1)
    with ocp.CheckpointManager(folder, options=options) as manager:
        if manager.latest_step() is None:
            for step in (1, 2, 3):
                saved = manager.save(step, args=ocp.args.Composite(
                    state=ocp.args.StandardSave(state), place=ocp.args.JsonSave({"step": step})))
                assert saved
            manager.wait_until_finished()
        abstract = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
        step = manager.latest_step()
        back = manager.restore(step, args=ocp.args.Composite(
            state=ocp.args.StandardRestore(abstract), place=ocp.args.JsonRestore()))
        steps = list(manager.all_steps())
    for name in values:
        for shard in back.state[name].addressable_shards:
            np.testing.assert_array_equal(shard.data, np.asarray(values[name][0])[shard.index])
    print(f"restored={steps} {back.place} of {jax.process_count()} x {len(jax.local_devices())}")
"""


@pytest.mark.slow
@pytest.mark.multihost
@pytest.mark.parametrize(
    "shapes",
    [
        [(2, 2), (3, 1)],
        pytest.param([(1, 2), (2, 2)], marks=pytest.mark.nightly),
        pytest.param([(3, 1), (1, 2), (2, 2)], marks=pytest.mark.nightly),
    ],
    ids=str,
)
def test_orbax_saves_and_restores_over_any_number_of_processes(shapes, script, tmp_path):
    path = script(ORBAX)
    for num_processes, devices in shapes:
        end = run(path, num_processes, devices, arguments=[str(tmp_path / "checkpoints")])
        assert end.code == 0, end
        for rank in range(num_processes):
            assert end.value(rank, "restored") == (
                f"[2, 3] {{'step': 3}} of {num_processes} x {devices}"
            )


# --- the persistent compilation cache -----------------------------------------------------------

CACHE = """
    import sys, jax, jax.numpy as jnp, numpy as np
    from jax.experimental import multihost_utils
    from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
    from jaxgoodput import _jax

    jax.config.update("jax_compilation_cache_dir", sys.argv[1])
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    seen = {}
    _jax.listen_for_compilations(lambda c: seen.setdefault(c.name, []).append(c.cached))

    def own(x):
        return jnp.sin(x) @ x.T

    def everyone(x):
        return jnp.cos(x).sum()

    for name, devices in (("own", jax.local_devices()), ("everyone", jax.devices())):
        sharding = NamedSharding(Mesh(np.array(devices), ("data",)), P("data"))
        x = jax.make_array_from_callback((4, 4), sharding, lambda i: np.ones((4, 4))[i])
        jax.block_until_ready(jax.jit({"own": own, "everyone": everyone}[name])(x))
        multihost_utils.sync_global_devices(name)
    print("cached=" + " ".join(f"{n}:{seen.get(n, seen.get('jit_' + n, seen.get(f'jit({n})')))}"
                               for n in ("own", "everyone")))
"""


@pytest.mark.slow
@pytest.mark.multihost
def test_every_process_finds_its_programs_again(script, tmp_path):
    path, folder = script(CACHE), tmp_path / "cache"
    cold = run(path, 2, 2, arguments=[str(folder)])
    assert cold.code == 0, cold
    assert not list(folder.glob("*.part"))
    warm = run(path, 2, 2, arguments=[str(folder)])
    assert warm.code == 0, warm
    for rank in range(2):
        # (Whoever comes second may find what the other has just compiled for everyone.)
        assert cold.value(rank, "cached").startswith("own:[False] everyone:")
        assert warm.value(rank, "cached") == "own:[True] everyone:[True]"


def test_sharing_the_cache_is_undone_completely(uncached):
    def parts():
        return (
            cache_key._hash_accelerator_config,
            compiler._compile_and_write_cache,
            lru_cache.LRUCache.put,
        )

    before = parts()
    undo = _jax.share_compilation_cache()
    assert all(old is not new for old, new in zip(before, parts(), strict=True))
    shared = parts()
    _jax.share_compilation_cache()()  # a second call changes nothing, and undoes nothing
    assert parts() == shared
    undo()
    assert parts() == before


def test_a_cache_entry_appears_whole_or_not_at_all(shared_cache, tmp_path, monkeypatch):
    cache = lru_cache.LRUCache(str(tmp_path), max_size=-1)
    cache.put("key", b"value")
    cache.put("key", b"another")  # the first stays, as in the original
    assert cache.get("key") == b"value"

    def half_written(path, value):
        with open(path, "wb") as file:
            file.write(value[:2])
        raise KeyboardInterrupt

    path_type = type(cache.path)
    monkeypatch.setattr(path_type, "write_bytes", half_written)
    with pytest.raises(KeyboardInterrupt):
        cache.put("torn", b"value")
    assert cache.get("torn") is None


def test_rebinding_a_name_that_is_not_there_is_an_error():
    with pytest.raises(RuntimeError, match=r"does not use \['absent'\]"):
        _jax._rebound(_listens, absent=1)


# --- compilations -------------------------------------------------------------------------------


@pytest.fixture
def compilations(uncached):
    seen = []
    undo = _jax.listen_for_compilations(seen.append)
    yield seen
    undo()


def test_each_compilation_is_told_once_with_its_thread(compilations):
    @jax.jit
    def triple(x):
        return 3 * x

    small, large = jnp.ones(2), jnp.ones(3)
    compilations.clear()
    triple(small)
    triple(small)
    assert [c.thread_id for c in compilations] == [threading.get_ident()]
    assert "triple" in compilations[0].name
    assert compilations[0].seconds > 0
    assert not compilations[0].cached

    other = []

    def compile_ahead():
        other.append(threading.get_ident())
        triple.lower(jax.ShapeDtypeStruct((3,), jnp.float32)).compile()

    thread = threading.Thread(target=compile_ahead)
    thread.start()
    thread.join()
    assert [c.thread_id for c in compilations[1:]] == other
    triple(large)  # compiled ahead: nothing left to do
    assert len(compilations) == 2


def test_nobody_is_told_after_the_undo():
    seen = []
    _jax.listen_for_compilations(seen.append)()
    jax.jit(lambda x: x - 17)(jnp.ones(5))
    assert not seen


# -- priorities --------------------------------------------------------------------------------------


def gathers_layers(*, priorities):
    """Whether a program gathers its parameters to use them; they are cut over the axis of the batch."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(1, 8), ("data", "fsdp"))

    def abstract(shape, *spec, dtype=jnp.float32):
        sharding = jax.sharding.NamedSharding(mesh, PartitionSpec(*spec))
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    lowered = jax.jit(lambda code, embed, up: jnp.tanh(embed[code] @ up).sum()).lower(
        abstract((32, 16), ("fsdp", "data"), dtype=jnp.int32),
        abstract((256, 64), None, "fsdp"),
        abstract((64, 256), "fsdp"),
    )
    _jax.set_priorities(lowered, priorities, first="data")
    return "f32[64,256]{1,0} all-gather(" in str(lowered.compile().as_text())


def test_priorities_reach_the_partitioner():
    assert _jax.keeps_priorities()
    assert gathers_layers(priorities={"fsdp": 1}) and not gathers_layers(priorities={})


@pytest.mark.parametrize(("version", "flags", "kept"), [
    ((0, 10, 2), "", True),
    ((0, 11, 0), "--xla_dump_to=x", False),
    ((0, 11, 0), "--xla_dump_to=x --xla_enable_hlo_sharding_v3=false", True),
])  # fmt: skip
def test_where_priorities_are_lost_is_known(monkeypatch, version, flags, kept):
    monkeypatch.setattr(jax, "__version_info__", version)
    monkeypatch.setenv("XLA_FLAGS", flags)
    assert _jax.keeps_priorities() == kept


def test_the_operands_of_a_scan_are_told_apart():
    def total(scale, start, rows):
        return jax.lax.scan(lambda sums, row: (sums + scale * row, sums), start, rows)

    (scan,) = jax.make_jaxpr(total)(2.0, jnp.zeros(3), jnp.ones((4, 3))).eqns
    num_consts, num_carried = _jax.operands_of_scan(scan.params)
    assert (num_consts, num_carried, len(scan.invars)) == (1, 1, 3)


SETTINGS = {
    "double": lambda: jax.enable_x64(True),
    "products": lambda: jax.default_matmul_precision("highest"),
    "types": lambda: jax.numpy_dtype_promotion("strict"),
    "NaN": lambda: jax.debug_nans(True),
    "transfers": lambda: jax.transfer_guard("disallow"),
}


def settings_now():
    names = ("enable_x64", "default_matmul_precision", "numpy_dtype_promotion", "debug_nans")
    return [getattr(jax.config, f"jax_{name}") for name in names]


@given(st.lists(st.sampled_from(sorted(SETTINGS)), unique=True))
def test_a_thread_gets_the_settings_of_another_but_no_guard_of_its_transfers(names):
    with contextlib.ExitStack() as stack:
        for name in names:
            stack.enter_context(SETTINGS[name]())
        expected, within = settings_now(), _jax.settings_here()
    found = []

    def run():
        before = settings_now()
        with within():
            found.append(settings_now())
            guard = jax_config.transfer_guard_host_to_device.get_local()
            found.append(guard is jax_config.config_ext.unset)
        found.append(settings_now() == before)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found == [expected, True, True]
