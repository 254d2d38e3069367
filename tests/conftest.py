"""Hardens JAX for every test: eight devices, no silent rank promotion, an untouched environment."""

import os
from importlib.metadata import version

# Programs of eight devices on two cores: as many threads again as devices, or a collective that waits in
# the compiler's thread pool can keep its peers from being run at all. Read when the first device is made.
os.environ.setdefault("NPROC", "16")
# jaxlib 0.10: the kernels of XLA:CPU by its older generator, which takes half of the time; sums may end in
# other bits than users see. XLA_FLAGS=--xla_cpu_use_fusion_emitters=true tests theirs. jaxlib 0.11 has the
# newer one only, and must keep priorities (`_jax.keeps_priorities`). A flag that is unknown ends the process.
KEPT = "--xla_enable_hlo_sharding_v3=false"
OWN = {"0.10": "--xla_cpu_use_fusion_emitters=false", "0.11": KEPT, "0.12": KEPT}
FLAG = OWN.get(".".join(version("jaxlib").split(".")[:2]), "")
os.environ["XLA_FLAGS"] = f"{FLAG} {os.environ.get('XLA_FLAGS', '')}"

import jax  # noqa: E402

# Before anything asks for a device: the number cannot change afterwards.
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")

import gc  # noqa: E402
import pathlib  # noqa: E402
import signal  # noqa: E402

import compilations  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402
from hypothesis import settings  # noqa: E402

from jaxgoodput.clock import FakeClock  # noqa: E402

compilations.use_folder()

# A machine that is busy elsewhere fails no test. Generated cases are the same in every run, so that a change
# is judged by what it changes; the nightly tests look for others: --hypothesis-profile=search.
settings.register_profile("same", deadline=None, derandomize=True)
settings.register_profile("search", deadline=None)
settings.load_profile("same")

# Under nohup it is ignored, in every process that a test starts as well, whose traps then do nothing.
if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

REPOSITORY = pathlib.Path(__file__).resolve().parent.parent
SHARED = REPOSITORY.parent / "shared"


def pytest_addoption(parser):
    parser.addoption(
        "--platform", default="cpu", help="JAX's platform; tests of one device run on 'cuda'."
    )


def pytest_configure(config):
    jax.config.update("jax_platforms", config.getoption("--platform"))
    if not hasattr(config, "workerinput"):  # in the one process that the others are started by
        compilations.prune()


@pytest.hookimpl(wrapper=True)
def pytest_pycollect_makeitem():
    """Leave all but two slow cases of a test to the nightly run, unless it says itself which to leave."""
    found = yield
    cases = [x for x in found if isinstance(x, pytest.Item)] if isinstance(found, list) else []
    slow = [x for x in cases if x.get_closest_marker("slow")]
    if not any(x.get_closest_marker("nightly") for x in cases):
        for case in slow[1:-1]:
            case.add_marker(pytest.mark.nightly)
    return found


@pytest.fixture
def uncached():
    """No program is found in the folder that all tests share: each is compiled."""
    with compilations.set_aside():
        yield


@pytest.fixture
def key():
    return jax.random.key(0)


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture
def rng():
    return np.random.default_rng(0)


@pytest.fixture(scope="session")
def golden():
    """The folder of numbers produced by the reference systems, or a skip that says so."""
    folder = SHARED / "golden"
    if not folder.is_dir():
        pytest.skip("the golden numbers (../shared/golden) are not beside this checkout")
    return folder


@pytest.fixture(scope="session")
def shared_data():
    """The folder of the public traces, or a skip that says so."""
    folder = SHARED / "data"
    if not folder.is_dir():
        pytest.skip("the public traces (../shared/data) are not beside this checkout")
    return folder


@pytest.fixture(scope="module", autouse=True)
def _kept_objects_are_left_alone():
    """Python's garbage collection looks once through what a file of tests leaves behind, JAX's caches above
    all, and not each time: in a profile of a late test, a third of the samples lay in it."""
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _environment_is_left_alone():
    before = dict(os.environ)
    yield
    changed = {k for k in before.keys() | os.environ.keys() if before.get(k) != os.environ.get(k)}
    changed -= {
        "PYTEST_CURRENT_TEST",
        "CRC32C_SW_MODE",
    }  # the latter by tensorboardX, when it is imported
    assert not changed, f"the test changed the environment: {sorted(changed)}"
