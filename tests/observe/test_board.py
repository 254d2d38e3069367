"""`jaxgoodput board` starts a TensorBoard that has the runs under their names, and ends with it."""

import http.server
import json
import sys
import threading
import urllib.request

import pytest
import synthetic
from processes import LIMIT_S

from jaxgoodput import cli
from jaxgoodput.clock import FakeClock
from jaxgoodput.observe import board, hooks
from jaxgoodput.observe.dashboard.tensorboard import Dashboard


def run(workdir):
    clock = FakeClock()
    dashboard = Dashboard(workdir, clock=clock)
    synthetic.run(lambda event: hooks.call([dashboard], event), clock, steps=100)
    dashboard.close()
    return str(workdir)


@pytest.mark.slow
def test_runs_are_shown_under_their_names(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(board, "LIMIT_S", LIMIT_S)
    pytest.importorskip("tensorboard", reason="the tensorboard package is not installed")
    seen = {}

    def look(url):
        base = url.partition("/?")[0]
        for _ in range(120):  # it reads runs one by one
            with urllib.request.urlopen(f"{base}/data/plugin/scalars/tags", timeout=20) as reply:
                seen["tags"] = json.load(reply)
            if len(seen["tags"]) == 4 and all(map(len, seen["tags"].values())):
                break
            board.SystemClock().sleep(0.5)
        seen["url"] = url
        raise KeyboardInterrupt  # as a user at the terminal

    assert board.show([run(tmp_path / "a"), run(tmp_path / "b")], look) == 0
    assert set(seen["tags"]) == {"a/measured", "a/model", "b/measured", "b/model"}
    about = seen["tags"]["a/measured"]["batch/global"]["description"]
    assert "samples of one update" in about
    assert "pinnedCards=" in seen["url"] and "smoothing=0" in seen["url"]
    assert "Ctrl-C" in capsys.readouterr().out


SERVES = """
import http.server, sys
server = http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), http.server.SimpleHTTPRequestHandler)
server.RequestHandlerClass.do_GET = lambda self: (self.send_response(200), self.end_headers())
server.handle_request()
print("it has had enough", file=sys.stderr)
sys.exit(3)
"""


def test_a_port_in_use_shows_nobody_elses_server(tmp_path, capsys):
    (tmp_path / "tensorboard").mkdir()

    class Strange(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()

    with http.server.HTTPServer(("127.0.0.1", 0), Strange) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        port = server.server_port
        assert board.show([str(tmp_path)], lambda url: pytest.fail(url), port=port) == 1
        server.shutdown()
    assert f"port {port} is in use" in capsys.readouterr().err


def test_a_tensorboard_that_ends_by_itself_is_no_success(tmp_path, capsys, monkeypatch):
    (tmp_path / "tensorboard").mkdir()
    monkeypatch.setattr(board, "LIMIT_S", LIMIT_S)
    monkeypatch.setattr(
        board, "command", lambda runs, port: [sys.executable, "-c", SERVES, str(port)]
    )
    assert board.show([str(tmp_path)], lambda url: True) == 1
    assert "ended by itself: it has had enough" in capsys.readouterr().err


def test_names_differ(tmp_path):
    for name in ("a/run", "b/run", "c"):
        (tmp_path / name / "tensorboard").mkdir(parents=True)
    found = board.named([str(tmp_path / name) for name in ("a/run", "b/run", "c")])
    assert list(found) == ["a/run", "b/run", "c"]


def test_tensorboard_reads_runs_whose_folders_have_one_name(tmp_path):
    loader = pytest.importorskip("tensorboard.backend.event_processing.data_ingester")
    for name in ("a/run", "b/run"):
        (tmp_path / name / "tensorboard").mkdir(parents=True)
    told = board.command(board.named([str(tmp_path / n) for n in ("a/run", "b/run")]), 6006)
    spec = loader._parse_event_files_spec(told[told.index("--logdir_spec") + 1])
    assert spec == {str(tmp_path / n / "tensorboard"): n for n in ("a/run", "b/run")}


def test_a_link_is_a_way_round_a_path_that_tensorboard_would_cut(tmp_path):
    (tmp_path / "x,y" / "tensorboard").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "x,y")
    board.command(board.named([str(tmp_path / "link")]), 6006)
    with pytest.raises(ValueError, match="Make a symbolic link"):
        board.command(board.named([str(tmp_path / "x,y")]), 6006)


@pytest.mark.parametrize("port", ["0", "70000"])
def test_a_port_that_is_none_is_refused(tmp_path, capsys, port):
    with pytest.raises(SystemExit) as refused:
        cli.main(["board", str(tmp_path), "--port", port])
    assert refused.value.code == 2 and port in capsys.readouterr().err


def test_what_cannot_be_shown_is_said(tmp_path, capsys):
    assert cli.main(["board", str(tmp_path)]) == 2
    assert "no run has written curves there" in capsys.readouterr().err
    with pytest.raises(ValueError, match="comma"):
        board.command({"a": tmp_path / "x,y"}, 6006)
