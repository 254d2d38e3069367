"""The service against its own OpenAPI: whatever is sent, nothing breaks, and all answers are documented."""

import shutil
import subprocess
import sys

import pytest
import services

from jaxgoodput.cluster.client import read_token

pytestmark = [pytest.mark.multihost, pytest.mark.slow]


@pytest.mark.parametrize(
    "most_examples", [10, pytest.param(100, marks=pytest.mark.nightly, id="nightly")]
)
@pytest.mark.timeout(1800)
def test_whatever_is_sent_gets_an_answer_that_is_documented(tmp_path, most_examples):
    pytest.importorskip("schemathesis", reason="schemathesis is not installed")
    program = shutil.which("schemathesis", path=f"{sys.exec_prefix}/bin")
    assert program is not None
    # It asks without a token as well, more often than an honest address would; and what waits is waited for.
    options = ["--local", "0", "--rate", "100000", "--wrong-rate", "100000"]
    options += ["--longest-wait-s", "0.2", "--questions", "100000"]
    with services.Service(tmp_path / "service", *options) as service:
        services.join(service.client())
        token = read_token(service.folder / "token")
        url = (service.folder / "address").read_text().strip()
        command = [
            program,
            "run",
            f"{url}/openapi.json",
            "--header",
            f"Authorization: Bearer {token}",
        ]
        command += ["--checks", "all", "--continue-on-failure", "--no-color"]
        command += ["--max-examples", str(most_examples), "--workers", "1"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-8000:]
        assert "Traceback" not in service.log.read_text()
        assert service.child.poll() is None
