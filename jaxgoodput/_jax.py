"""The only file with private JAX calls: the coordination service and its client, the compilation cache, and
the priorities of shardings.

Each of them has a test in `tests/test_jax_private.py` that fails if a JAX version changes what is used here.
Known: jax 0.10, 0.11 and 0.12; pyproject.toml allows the versions on which all tests have run.

Why not `jax.distributed.initialize`? It hosts the coordination service inside process 0, so that the death of
process 0 aborts all other processes. It also handles SIGTERM itself, so that Python never learns that the job
should save and stop.
"""

import contextlib
import gc
import importlib.metadata
import os
import re
import socket
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.extend.backend
from absl import logging
from jax._src import api_util, cache_key, compiler, distributed, lru_cache, xla_bridge
from jax._src import config as jax_config
from jax._src.lib import _jax as runtime  # pyright: ignore[reportPrivateImportUsage]
from jax._src.lib import utils as runtime_utils  # pyright: ignore[reportPrivateImportUsage]
from jax.experimental import multihost_utils
from jax.interpreters import ad
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import sdy

from jaxgoodput.clock import Clock, SystemClock

KNOWN = ((0, 10), (0, 11), (0, 12))

_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"
_CACHE_HIT_EVENT = "/jax/compilation_cache/cache_hits"
_PROBE_PAUSE_S = 0.02
_PRIORITIES_KEPT = "--xla_enable_hlo_sharding_v3=false"


def require_known_version(version: str | None = None) -> None:
    """Raise an error if the private parts of JAX `version` (default: the installed one) are not known here.

    Raises:
        RuntimeError: the version is not one of `KNOWN`.
    """
    version = jax.__version__ if version is None else version
    major_minor = tuple(int(part) for part in version.split(".")[:2])
    if major_minor not in KNOWN:
        (major, low), *_, (_, high) = KNOWN
        raise RuntimeError(
            f"jobs of several processes need private parts of JAX, which are known for jax {major}.{low} to "
            f"{major}.{high}, but jax {version} is installed. Install one that this package allows (pip "
            f"install '{_allowed()}'), or run one process: that uses public JAX only."
        )


def _allowed() -> str:
    """Return what the package's own requirements say of JAX."""
    every = importlib.metadata.requires("jaxgoodput") or []
    return next(x for x in every if re.match(r"jax\b", x)).partition(";")[0].replace(" ", "")


def waits_for_xla(frame: types.FrameType | None) -> bool:
    """Return whether the thread of `frame` is compiling; an exception there does not end the compilation."""
    while frame is not None:
        if frame.f_globals is vars(compiler):
            return True
        frame = frame.f_back
    return False


def operands_of_scan(params: Mapping[str, Any]) -> tuple[int, int]:
    """Return how many operands of a `scan` equation are constants, and how many it carries on."""
    if "ft_in" in params:  # jax 0.12
        consts, carried, _ = params["ft_in"].unpack()
        return len(consts), len(carried)
    return params["num_consts"], params["num_carry"]


def found_by_debugging(error: BaseException) -> str | None:
    """Return "nan" or "inf" if `jax_debug_nans` or `jax_debug_infs` found it in a compiled program's results.

    Functions under `jax.jit` raise FloatingPointError then, executables a private error. None for any other
    error.
    """
    is_found = isinstance(error, api_util.InternalFloatingPointError)
    return str(error.ty) if is_found else None


def settings_here() -> Callable[[], contextlib.AbstractContextManager[None]]:
    """Return what gives another thread the settings of JAX that `with` statements have changed in this one.

    Such settings (precisions, types, switches) belong to a thread. What is traced on another one would be
    another program, and values put on a device there of another type. Guards of transfers stay where they
    are: they watch a thread. What is no setting (`jax.set_mesh`, `compute_on`) is left out.
    """
    holders: Any = jax_config.config._value_holders.items()
    states = [x for n, x in holders if hasattr(x, "get_local") and "transfer_guard" not in n]
    local = [(state, state.get_local()) for state in states]
    changed = [(state, value) for state, value in local if value is not jax_config.config_ext.unset]

    @contextlib.contextmanager
    def entered() -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for state, value in changed:
                stack.enter_context(state(value))
            yield

    return entered


def looks_for() -> str | None:
    """Return the name of a switch that is set and makes a NaN or an infinity an error; None if none is."""
    names = ("jax_debug_nans", "jax_debug_infs")
    return next((name for name in names if getattr(jax.config, name)), None)


def zero_cotangent(like: Any) -> Any:
    """Return what the function that `jax.vjp` returns takes for a result that counts for nothing.

    Nothing is computed for it. For an array of zeros everything is: XLA may not drop a product with 0.
    """
    return ad.Zero(jax.typeof(like).to_ct_aval())


@contextlib.contextmanager
def trying() -> Iterator[None]:
    """Run trials on made-up values without JAX's debugging switches: what they find says nothing of the run.

    Types are promoted by the standard rules: optax's adam and schedules fail under the strict ones.
    """
    with (
        jax.debug_nans(False),
        jax.debug_infs(False),
        jax.debug_key_reuse(False),
        jax.numpy_dtype_promotion("standard"),
        jax.transfer_guard("allow"),
    ):
        yield


def quiet_runtime_log() -> None:
    """Reduce the log of the C++ runtime to errors, for launchers.

    Otherwise each coordination service warns that it is recoverable, which is intended.
    """
    runtime_utils.absl_set_min_log_level(2)


class CoordinationService:
    """A running JAX coordination service; start one with `start_coordination_service`.

    It runs in the launcher, so that the death of one worker does not abort the others. Keep it until every
    worker has left: shutting it down aborts all clients that are still connected.
    """

    def __init__(self, service: runtime.DistributedRuntimeService, address: str):
        self._service = service
        self.address = address

    def shutdown(self) -> None:
        """Stop serving. Idempotent."""
        self._service.shutdown()


def start_coordination_service(
    num_processes: int,
    *,
    host: str = "127.0.0.1",
    port: int | None = None,
    heartbeat_timeout_s: int = 100,
    shutdown_timeout_s: int = 10,
) -> CoordinationService:
    """Start the service for one generation of `num_processes` workers at `host:port` (default: a free port).

    If `host` is a loopback address, the service listens on the loopback interface only, otherwise on all
    interfaces. It is recoverable: the death of a worker does not abort the others.

    Raises:
        ValueError: `num_processes` below 1.
        RuntimeError: the installed JAX is not supported.
        OSError: the port is in use or invalid.
    """
    require_known_version()
    if num_processes < 1:
        raise ValueError(f"num_processes={num_processes}: a job has at least one process.")
    loopback = host in ("127.0.0.1", "localhost")
    # The runtime binds with SO_REUSEPORT and would silently share a port with another service. An ordinary
    # socket therefore checks that the port is free, and another holds it until the service listens.
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        try:
            probe.bind(("127.0.0.1" if loopback else "", port or 0))
        except (OSError, OverflowError) as error:
            raise OSError(
                f"the coordination service cannot listen on port {port}: {error}. Choose another "
                "port, or leave it out for a free one."
            ) from error
        port = probe.getsockname()[1]
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as claim:
        claim.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        claim.bind(("127.0.0.1" if loopback else "", port))
        service = runtime.get_distributed_runtime_service(
            f"127.0.0.1:{port}" if loopback else f"[::]:{port}",
            num_processes,
            heartbeat_timeout=heartbeat_timeout_s,
            shutdown_timeout=shutdown_timeout_s,
            recoverable=True,
        )
    return CoordinationService(service, f"{host}:{port}")


def connect(
    address: str,
    num_processes: int,
    process_id: int,
    *,
    connect_timeout_s: float = 60.0,
    others_timeout_s: float = 60.0,
    heartbeat_timeout_s: int = 100,
    shutdown_timeout_s: int = 10,
    clock: Clock | None = None,
) -> None:
    """Join a job: afterwards `jax.process_count()` is `num_processes`, and devices are global.

    Unlike `jax.distributed.initialize`, this starts no service and leaves SIGTERM to Python. Call it before
    anything asks JAX for a device. If another process has not connected within `others_timeout_s`, the
    runtime aborts this one.

    Raises:
        ValueError: `process_id` is not in [0, num_processes), or `address` is not host:port.
        RuntimeError: JAX has already used its devices, is already connected, or is not supported.
        ConnectionError: nothing listens at `address` within `connect_timeout_s`.
    """
    require_known_version()
    if not 0 <= process_id < num_processes:
        raise ValueError(
            f"process_id={process_id} is not in [0, {num_processes}), the range for "
            f"num_processes={num_processes}. Give each process its own rank."
        )
    if distributed.global_state.client is not None:
        raise RuntimeError(
            f"this process is already connected to {distributed.global_state.coordinator_address}. "
            "Call connect once, and do not call jax.distributed.initialize as well."
        )
    require_unused_devices()
    # A client that fails to connect aborts the whole process: try with a plain socket first.
    _wait_until_listening(address, connect_timeout_s, clock or SystemClock())
    client = runtime.get_distributed_runtime_client(
        address,
        process_id,
        init_timeout=max(int(others_timeout_s), 1),
        shutdown_timeout=shutdown_timeout_s,
        heartbeat_timeout=heartbeat_timeout_s,
        shutdown_on_destruction=False,
        use_compression=True,
    )
    client.connect()
    state = distributed.global_state
    state.client = client
    state.process_id = process_id
    state.num_processes = num_processes
    state.coordinator_address = address


def require_unused_devices() -> None:
    """Raise RuntimeError if JAX has already used its devices, which can then no longer be chosen."""
    if xla_bridge.backends_are_initialized():
        raise RuntimeError(
            "JAX has already used its devices, so it can no longer connect to other processes, or get other "
            "devices. Connect before the first jax.devices(), array or jitted call, including those made "
            "while modules are imported: call jaxgoodput.initialize() at the top of the script."
        )


def connected_to() -> str | None:
    """Return the address of the coordinator that this process is connected to, or None."""
    if distributed.global_state.client is None:
        return None
    return distributed.global_state.coordinator_address


def own_host() -> str:
    """Return an address at which the other processes of the job can reach this machine."""
    address = connected_to()
    if address is None:
        return "127.0.0.1"
    host, _, port = address.rpartition(":")
    kind, _, _, _, place = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)[
        0
    ]
    with socket.socket(kind, socket.SOCK_DGRAM) as probe:
        probe.connect(place)  # sends nothing, but chooses the network interface
        return str(probe.getsockname()[0])


def _wait_until_listening(address: str, timeout_s: float, clock: Clock) -> None:
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ValueError(f"the coordinator's address {address!r} is not of the form host:port.")
    deadline_s = clock.now() + timeout_s
    while True:
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=timeout_s).close()
            return
        except OSError as error:
            if clock.now() >= deadline_s:
                raise ConnectionError(
                    f"no coordination service answers at {address} after {timeout_s:g} s "
                    f"({error}). The launcher runs it (jaxgoodput run, jaxgoodput coordinate): check that "
                    "the launcher is alive, and that this host can reach its address and port."
                ) from error
        clock.sleep(_PROBE_PAUSE_S)


def forget_devices() -> None:
    """Leave the job, if connected, and drop all devices: arrays, executables and meshes become invalid.

    Afterwards the process is alone, and may `connect` to another generation.
    """
    state = distributed.global_state
    if state.client is not None:
        state.client.shutdown()
        state.client = None
    state.process_id, state.num_processes, state.coordinator_address = 0, 1, None
    # Orbax caches the client of the generation that has just ended, and would wait for it.
    signaling = sys.modules.get("orbax.checkpoint._src.futures.signaling_client")
    if signaling is not None:
        signaling.get_signaling_client.cache_clear()
    # A cached mesh keeps its devices, and devices keep connections at which peers would wait until a timeout.
    for function in vars(multihost_utils).values():
        if hasattr(function, "cache_clear"):
            function.cache_clear()
    clients = [weakref.ref(client) for client in xla_bridge._backends.values()]
    jax.extend.backend.clear_backends()
    for _ in range(4):  # freeing one object may make others collectable
        gc.collect()
        if all(client() is None for client in clients):
            return
    logging.warning(
        "something still references an array, an executable or a mesh of the previous generation: other "
        "processes may wait for this one until their timeout. "
        "Keep no such object in a hook or a global variable."
    )


class PeerGone(RuntimeError):
    """Error: a process that this one waited for is gone."""


class SharedStore:
    """A key-value store that all processes of the job share through the launcher, without collectives.

    Get it with `shared_store`. A call takes a fraction of a millisecond on one host. Thread-safe, and usable
    while the devices are busy.
    """

    def __init__(self, client: runtime.DistributedRuntimeClient):
        self._client = client

    def set(self, key: str, value: str, *, overwrite: bool = False) -> bool:
        """Write a value. Returns False and changes nothing if the key exists and `overwrite` is false."""
        try:
            self._client.key_value_set(key, value, allow_overwrite=overwrite)
        except jax.errors.JaxRuntimeError as error:
            if "ALREADY_EXISTS" in str(error):
                return False
            raise
        return True

    def try_get(self, key: str) -> str | None:
        """Return the value of a key, or None if it has not been written yet. Does not wait."""
        try:
            return self._client.key_value_try_get(key)
        except jax.errors.JaxRuntimeError as error:
            if "NOT_FOUND" in str(error):
                return None
            raise

    def count(self, key: str) -> int:
        """Return how many calls with `key` all processes have made before; each call gets its own number."""
        return self._client.key_value_increment(key, 1) - 1

    def forget(self, key: str) -> None:
        """Delete a key, and all keys that begin with it and a slash."""
        self._client.key_value_delete(key)

    def get(self, key: str, *, timeout_s: float) -> str:
        """Wait for a key, and return its value.

        Raises:
            TimeoutError: no process wrote it within `timeout_s`.
        """
        try:
            return self._client.blocking_key_value_get(key, max(int(timeout_s * 1e3), 1))
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise
            raise TimeoutError(
                f"no process wrote {key!r} within {timeout_s:g} s. One of them is late or gone: "
                "see its output in the launcher's log."
            ) from error

    def wait(self, key: str, *, unless: Callable[[], bool]) -> str:
        """Wait for a key, and return its value; give up when `unless()` becomes true.

        Raises:
            PeerGone: `unless()` became true before the key was written.
        """
        while True:
            try:
                return self.get(key, timeout_s=0.2)
            except TimeoutError:
                if unless():
                    raise PeerGone(
                        f"no process of the job has written {key!r}, and the one that should is gone"
                    ) from None

    def barrier(self, name: str, *, timeout_s: float) -> None:
        """Return when every process has reached this barrier. Use each name only once.

        Raises:
            TimeoutError: a process did not reach it within `timeout_s`.
        """
        try:
            self._client.wait_at_barrier(name, max(int(timeout_s * 1e3), 1))
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise
            raise TimeoutError(
                f"not every process reached the barrier {name!r} within {timeout_s:g} s. One is late or "
                f"gone: see its output in the launcher's log ({error})."
            ) from error

    def meet(
        self,
        name: str,
        process_id: int,
        num_processes: int,
        *,
        timeout_s: float,
        unless: Callable[[], bool],
        clock: Clock | None = None,
    ) -> None:
        """Return when every process has called this, like `barrier`; give up when `unless()` becomes true.

        Raises:
            TimeoutError: a process did not call it within `timeout_s`.
            PeerGone: `unless()` became true.
        """
        clock = clock or SystemClock()
        deadline_s, pause_s = clock.now() + timeout_s, _PROBE_PAUSE_S / 16
        # A second run in the same job uses the same name: make the key unique by counting the uses.
        place = f"{name}, {self.count(f'{name}: process {process_id}')}"
        self.set(f"{place}/{process_id}", "", overwrite=True)
        while len(self._client.key_value_dir_get(f"{place}/")) < num_processes:
            if unless():
                raise PeerGone(
                    f"a process of the job is gone and will not reach {name!r}, at which all should meet"
                )
            if clock.now() >= deadline_s:
                raise TimeoutError(
                    f"not every process reached {name!r} within {timeout_s:g} s. One of them is late or "
                    "gone: see its output in the launcher's log."
                )
            clock.sleep(pause_s)
            pause_s = min(2 * pause_s, _PROBE_PAUSE_S)


def shared_store() -> SharedStore | None:
    """Return the job's shared store, or None if this process is not connected."""
    client = distributed.global_state.client
    return None if client is None else SharedStore(client)


def share_compilation_cache() -> Callable[[], None]:
    """Make the persistent compilation cache work for every process of a CPU job; return a function to undo
    it.

    By default only process 0 of a job finds its own entries: on CPU the key contains a fingerprint that
    differs between processes, and only process 0 writes. Afterwards the key contains the kind of the devices
    instead. Each program is written by the first of the processes that it runs on. Entries are written
    atomically, even if the writer is killed.

    Other backends keep their own keys and writers. Idempotent.

    Raises:
        RuntimeError: the installed JAX is not supported.
    """
    require_known_version()
    hash_config = cache_key._hash_accelerator_config
    compile_and_write = compiler._compile_and_write_cache
    put = lru_cache.LRUCache.put
    if getattr(hash_config, "shared", False):
        return lambda: None

    def hash_shared_config(hash_obj, accelerators):
        if all(device.platform == "cpu" for device in accelerators.flat):
            cache_key._hash_devices(hash_obj, accelerators)
        else:
            hash_config(hash_obj, accelerators)

    hash_shared_config.shared = True  # type: ignore[attr-defined]

    # JAX's writer refuses unless the process id is 0. Other threads would see a changed process id, so run a
    # copy of the writer whose globals say that every process is process 0.
    everyone = types.SimpleNamespace(global_state=types.SimpleNamespace(process_id=0))
    write_always = _rebound(compiler._cache_write, distributed=everyone)
    compile_and_write_always = _rebound(compile_and_write, _cache_write=write_always)

    def compile_and_write_own(backend, computation, executable_devices, *args, **kwargs):
        first = min(device.process_index for device in executable_devices)
        own = backend.platform == "cpu" and first == backend.process_index()
        write = compile_and_write_always if own else compile_and_write
        return write(backend, computation, executable_devices, *args, **kwargs)

    def put_whole(self, key, value):
        if self.eviction_enabled:  # JAX then uses locks and records access times
            return put(self, key, value)
        path = self.path / f"{key}{lru_cache._CACHE_SUFFIX}"
        if key and not path.exists():
            part = self.path / f"{key}.{os.getpid()}.{threading.get_ident()}.part"
            part.write_bytes(value)
            part.replace(path)

    cache_key._hash_accelerator_config = hash_shared_config
    compiler._compile_and_write_cache = compile_and_write_own
    lru_cache.LRUCache.put = put_whole

    def undo():
        cache_key._hash_accelerator_config = hash_config
        compiler._compile_and_write_cache = compile_and_write
        lru_cache.LRUCache.put = put

    return undo


def _rebound(function, **names):
    """Return a copy of `function` in which some global names are bound to other values."""
    missing = names.keys() - set(function.__code__.co_names)
    if missing:
        raise RuntimeError(
            f"{function.__qualname__} of jax {jax.__version__} does not use {sorted(missing)}"
        )
    return types.FunctionType(
        function.__code__,
        {**function.__globals__, **names},
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )


@dataclass(frozen=True)
class Compilation:
    """One program was compiled, or loaded from the persistent cache."""

    name: str
    """Name of the jitted function."""
    seconds: float
    """Wall time of the compilation."""
    cached: bool
    """Whether the program was found in the persistent compilation cache."""
    thread_id: int
    """`threading.get_ident()` of the thread that waited for it."""


def listen_for_compilations(callback: Callable[[Compilation], None]) -> Callable[[], None]:
    """Call `callback` after every backend compilation, in the waiting thread; return a function to undo it.

    Use it to find out what compiles and when. Tracing and lowering do not count, nor does a call whose
    executable is in memory.
    """
    found = threading.local()

    def on_event(event: str, **_: str | int) -> None:
        if event == _CACHE_HIT_EVENT:
            found.hit = True

    # Orbax reports counts this way, too, and beartype does not accept an int as a float.
    def on_duration(event: str, duration_secs: float | int, **labels: str | int) -> None:
        if event == _COMPILE_EVENT:
            cached, found.hit = getattr(found, "hit", False), False
            name = str(labels.get("fun_name", ""))
            callback(Compilation(name, duration_secs, cached, threading.get_ident()))

    jax.monitoring.register_event_listener(on_event)
    jax.monitoring.register_event_duration_secs_listener(on_duration)

    def undo():
        jax.monitoring.unregister_event_listener(on_event)
        jax.monitoring.unregister_event_duration_listener(on_duration)

    return undo


def keeps_priorities() -> bool:
    """Return whether `set_priorities` has an effect.

    jaxlib 0.11 drops priorities on the way to XLA, unless XLA_FLAGS contains `_PRIORITIES_KEPT` before JAX is
    first used. XLA versions that do not know this flag abort.
    """
    return jax.__version_info__ < (0, 11) or _PRIORITIES_KEPT in os.environ.get("XLA_FLAGS", "")


def set_priorities(lowered: jax.stages.Lowered, priorities: Mapping[str, int], first: str) -> None:
    """Let the partitioner propagate the shardings over some mesh axes before those over others.

    Shardy propagates shardings without a priority first, then those with priority 1, 2 and so on ("user
    priorities", made to propagate batch dimensions before tensor parallelism and that before ZeRO). JAX has
    no API for them yet. A dimension of an argument or result gets the highest priority number of its axes,
    or none if it is split over the axis `first`. Constraints inside the program get none. Nothing changes
    with another partitioner, or if `keeps_priorities()` is false.
    """
    if not jax.config.values["jax_use_shardy_partitioner"]:
        return
    module: Any = lowered.compiler_ir(
        "stablehlo"
    )  # changed in place; compile() takes it as it is then
    with module.context:
        main = next(
            op for op in module.body.operations if op.attributes["sym_name"].value == "main"
        )
        for kind in ("arg_attrs", "res_attrs"):
            if kind in main.attributes:
                told = [
                    ir.DictAttr.get(
                        {
                            one.name: _with_priorities(one.attr, priorities, first)
                            if one.name == "sdy.sharding"
                            else one.attr
                            for one in each
                        }
                    )
                    for each in main.attributes[kind]
                ]
                main.attributes[kind] = ir.ArrayAttr.get(told)


def _with_priorities(attribute: Any, priorities: Mapping[str, int], first: str) -> Any:
    sharding: Any = sdy.TensorShardingAttr(attribute)
    dims = []
    for each in sharding.dimension_shardings:
        dim = sdy.DimensionShardingAttr(each)
        names = [sdy.AxisRefAttr(axis).name for axis in dim.axes]
        order = max((priorities.get(name, 0) for name in names), default=0)
        order = None if first in names or not order else order
        dims.append(sdy.DimensionShardingAttr.get(dim.axes, dim.is_closed, order))
    return sdy.TensorShardingAttr.get(sharding.mesh_or_ref, dims, sharding.replicated_axes)
