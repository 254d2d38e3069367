"""Loaders of other libraries: every sample as often as asked, over restarts and other devices.

Which libraries they need, and how to install them, is said in `tests/support/loaders.py`. To test with them:

    pytest -m "nightly or not nightly" tests/train/test_loaders.py
"""

import contextlib
import importlib

import jax
import numpy as np
import pytest
from absl import logging
from loader_kills import killed
from loaders import FROM_BEGINNING, LOADERS, OTHER_DATA, SEEN_ANEW, Counted
from numbered import NUM_SAMPLES
from problems import Recorder, counting_config

from jaxgoodput.observe.events import FitEnd
from jaxgoodput.train.control import Preempted

NUM_KILLS = 3

# webdataset leaves its files to the garbage collector.
pytestmark = [
    pytest.mark.nightly,
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),  # torchdata calls it
]


@pytest.fixture(scope="module", autouse=True)
def _tensorflow():
    """It sets environment variables when it is imported, which a test must not."""
    with contextlib.suppress(ImportError):
        importlib.import_module("tensorflow")


def installed(name):
    """The loader of this name, or the test is skipped."""
    for module in LOADERS[name].needs:
        pytest.importorskip(module, reason=f"{module} is not installed")
    return LOADERS[name]


EXACT = [name for name, loader in LOADERS.items() if loader.is_exact and not loader.is_refused]


@pytest.mark.parametrize("name", EXACT)
def test_every_sample_comes_as_often_as_asked(name, tmp_path, monkeypatch):
    loader = installed(name)
    said = []
    monkeypatch.setattr(logging, "warning", lambda m, *values: said.append(m % values))
    length = {"epochs": loader.times} if loader.has_epochs else {"base_steps": 1000.0}
    settings = counting_config(tmp_path / "run", **length)

    def trainer(num_devices, then=None):
        seen = Recorder(then)
        devices = jax.devices()[:num_devices]
        return Counted(settings, loader, tmp_path, devices=devices, hooks=[seen]), seen

    for end, num_devices in ((1, 1), (3, 4), (4, 2)):
        one, seen = trainer(num_devices)
        seen._then = lambda e, end=end, one=one: e.step == end and one.request_stop()
        with pytest.raises(Preempted):
            one.fit()
    last, seen = trainer(1)
    np.testing.assert_array_equal(last.fit().params["count"], loader.times)
    assert seen.of(FitEnd)[0].samples == loader.times * NUM_SAMPLES
    for sentence in (SEEN_ANEW, FROM_BEGINNING):
        assert any(sentence in one for one in said) == (sentence == loader.warning)


@pytest.mark.multihost
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", LOADERS)
def test_a_run_that_is_killed_keeps_its_samples_or_says_so_before_training(name, tmp_path):
    loader = installed(name)
    found = killed(name, tmp_path, times=loader.times, kills=NUM_KILLS)
    assert found.kills == (1 if loader.is_refused else NUM_KILLS)
    if loader.is_refused:
        assert OTHER_DATA in (found.refused or "")
    else:
        assert found.refused is None
    if loader.is_exact and not loader.is_refused:
        assert (found.lost, found.twice) == (0, 0), found
    for sentence in (SEEN_ANEW, FROM_BEGINNING):
        assert any(sentence in one for one in found.said) == (sentence == loader.warning)
