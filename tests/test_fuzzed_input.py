"""Whatever is typed, and whatever the files hold: it works, or a sentence says what is wrong with what."""

import contextlib
import json
import random
import re
import traceback

import pytest
import synthetic
from problems import config

from jaxgoodput import cli
from jaxgoodput._fields.serial import dumps
from jaxgoodput.clock import FakeClock
from jaxgoodput.cluster.simulate import commands as simulate_commands
from jaxgoodput.launcher import local, plan, supervise
from jaxgoodput.observe.journal import FILE_NAME, Journal
from jaxgoodput.specs import ClusterSpec, Node, Reservation
from jaxgoodput.train.config import with_overrides

COUNT = 30  # inputs of each kind; ten times as many are the nightly runs

# -- inputs ------------------------------------------------------------------------------------------

LONG, DEEP = "9" * 5000, "[" * 200_000
WORDS = (
    "0 -1 1 2 1e9 1e400 nan inf null true ² ٣ 0.1 1e-300 a ä [ {} ( ' %s {0} -- - .. / = ,".split()
)
WORDS += [
    "",
    " ",
    "9" * 30,
    LONG,
    "1" + "0" * 308,
    "\u2028",
    "\ud800",
    "a\0b",
    DEEP,
    '"',
    "x" * 300,
    "é" * 5000,
]
VALUES = [None, True, 0, -1, 1, 2, 10**30, 10**400, 0.0, 1e308, -1e-308, "", "²", "nan", "\ud800"]
VALUES += ["a\0\x1b[2J", [], {}, [0], {"": 0}, [[1, 2]], "x" * 5000]
BYTES = [
    b"",
    b"\0",
    b"\xff\xfe",
    b"\xef\xbb\xbf",
    b"\n",
    b"\r\n",
    b"\t",
    b",",
    b"null",
    b"NaN",
    b"1e999",
]
BYTES += [
    b"0",
    b"-",
    b'"',
    "²".encode(),
    LONG.encode(),
    DEEP.encode(),
    b'{"a":' * 1500,
    b"x" * 200_000,
]


def changed_json(value, draw: random.Random):
    """The value with one of its parts replaced, left out, renamed or laid deeper."""
    if isinstance(value, dict) and value and draw.random() < 0.85:
        name = draw.choice(sorted(value))
        rest = {k: v for k, v in value.items() if k != name}
        kind = draw.random()
        if kind < 0.1:
            return rest
        if kind < 0.2:
            return {**rest, str(draw.choice(WORDS)): value[name]}
        return {**value, name: changed_json(value[name], draw)}
    if isinstance(value, list) and value and draw.random() < 0.85:
        place = draw.randrange(len(value))
        kind = draw.random()
        if kind < 0.1:
            return value[:place]
        return [changed_json(v, draw) if i == place else v for i, v in enumerate(value)]
    if draw.random() < 0.05:
        for _ in range(draw.choice([10, 400, 900])):
            value = [value]
        return value
    return draw.choice(VALUES)


def changed_cells(text: str, draw: random.Random) -> str:
    """The table with one cell of a line replaced, or a line left out or doubled."""
    lines = text.splitlines()
    place = draw.randrange(len(lines))
    separator = "\t" if "\t" in text else ","
    cells = lines[place].split(separator)
    kind = draw.random()
    if kind < 0.7:
        cells[draw.randrange(len(cells))] = draw.choice(WORDS)
        lines[place] = separator.join(cells)
    elif kind < 0.8:
        del lines[place]
    elif kind < 0.9:
        lines.insert(place, draw.choice(lines))
    else:  # a column of zeros
        column = draw.randrange(len(cells))
        rows = [line.split(separator) for line in lines[1:]]
        rows = [[*row[:column], "0", *row[column + 1 :]] for row in rows]
        lines = [lines[0], *map(separator.join, rows)]
    return "\n".join(lines) + "\n"


def damage(path, draw: random.Random) -> None:
    """Change a file as people, programs and disks do."""
    data, kind = path.read_bytes(), draw.random()
    if kind < 0.1:
        data = data[: draw.randrange(len(data) + 1)]
    elif kind < 0.3:
        flipped = bytearray(data)
        for _ in range(draw.choice([1, 1, 1, 20])):
            flipped[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        data = bytes(flipped)
    elif kind < 0.4:
        start = draw.randrange(len(data))
        data = data[:start] + draw.choice(BYTES) + data[start + draw.choice([0, 1, 50]) :]
    elif kind < 0.45:
        data = draw.choice(BYTES)
    elif kind < 0.5:
        path.unlink()
        if draw.random() < 0.5:
            path.mkdir()
        return
    elif path.suffix in (".json", ".jsonl"):
        whole = path.suffix == ".json"
        lines = [data.decode()] if whole else data.decode().splitlines()
        for _ in range(draw.choice([1, 1, 10])):
            place = draw.randrange(len(lines))
            with contextlib.suppress(ValueError, RecursionError):  # damaged twice
                lines[place] = json.dumps(changed_json(json.loads(lines[place]), draw))
        data = ("\n".join(lines) + "\n").encode()
    else:
        data = changed_cells(data.decode(), draw).encode("utf-8", "surrogatepass")
    path.write_bytes(data)


def word(usual: list[str], draw: random.Random) -> str:
    """One of the usual values, a damaged one, or anything."""
    text = draw.choice(usual)
    kind = draw.random()
    if kind < 0.4:
        return text
    if kind < 0.6 and text:
        place = draw.randrange(len(text))
        return text[:place] + draw.choice(WORDS) + text[place + 1 :]
    return draw.choice(WORDS)


# -- what must come of them --------------------------------------------------------------------------


class Enough(BaseException):
    """It runs, and takes long."""


@pytest.fixture
def told(capsys, monkeypatch):
    """Calls a command in this process: its exit code, and that it said something if it did not work.

    A simulation that has begun is not waited for.
    """

    @contextlib.contextmanager
    def soon():
        calls = iter(range(60))

        def on_progress(name, progress):
            if next(calls, None) is None:
                raise Enough

        yield on_progress

    monkeypatch.setattr(simulate_commands, "_progress", soon)

    def call(arguments, *names):
        try:
            code = cli.main(arguments)
        except Enough:
            code = 0
        except SystemExit as ended:
            code = ended.code
        said = capsys.readouterr()
        assert code in (0, 1, 2), arguments
        assert "Traceback" not in said.err
        if code:
            assert re.search(r"^jaxgoodput( \w+)?: .{10,}", said.err, re.MULTILINE), said.err
            assert any(name in said.err for name in names or [""]), said.err
        return code

    return call


seeds = pytest.mark.parametrize(
    "seed", [0, *[pytest.param(seed, marks=pytest.mark.nightly) for seed in range(1, 11)]]
)


@pytest.mark.slow
@seeds
def test_a_report_of_any_journal(tmp_path, told, seed):
    path = tmp_path / FILE_NAME
    writer = Journal(tmp_path, clock=FakeClock())
    state = synthetic.run(writer.write, FakeClock(), steps=200, end=False)
    synthetic.run(writer.write, FakeClock(), steps=400, start_step=150, restart=1, state=state)
    writer.close()
    data = path.read_bytes()
    codes = set()
    for case in range(COUNT):
        if path.is_dir():
            path.rmdir()
        path.write_bytes(data)
        damage(path, random.Random(f"{seed} {case}"))
        codes.add(told(["report", str(tmp_path)], str(tmp_path)))
    assert codes == {0, 2}


def pollux(folder):
    """A small artifact of Pollux: its workload and its files."""
    toy = folder / "traces" / "toy"
    toy.mkdir(parents=True)
    places = [(p, size) for p in ("1", "2", "4", "11", "22", "44") for size in (4, 16, 64)]
    rows = [f"{p},{size},{0.1 + size / 400 + len(p) / 50},0.01" for p, size in places]
    (toy / "placements.csv").write_text(
        "placement,local_bsz,step_time,sync_time\n" + "\n".join(rows) + "\n"
    )
    rows = [f"{n},{4 * n},{size},{0.2 + size / 400},0.02" for n in (1, 2, 4) for size in (4, 64)]
    (toy / "scalability.csv").write_text(
        "num_nodes,num_replicas,local_bsz,step_time,sync_time\n" + "\n".join(rows) + "\n"
    )
    for batch in (16, 64, 256):
        rows = [f"{100 * e},{100 * e},0.5,1.0,{4.0 * e}" for e in (1, 2)]
        (toy / f"validation-{batch}.csv").write_text(
            "progress,iteration,metric,grad_sqr,grad_var\n" + "\n".join(rows) + "\n"
        )
    path = folder / "workloads" / "workload-1.csv"
    path.parent.mkdir()
    path.write_text("name,time,application,num_replicas,batch_size\nx,0,toy,1,64\ny,100,toy,2,64\n")
    return path, [path, *sorted(toy.iterdir())]


def gavel(folder):
    """A small artifact of Gavel: its trace and its files."""
    one, two = "('A3C', 1)", "('LM (batch size 5)', 2)"
    alone = {one: {"null": 4.0, one: [3.0, 2.0]}, two: {"null": 6.0}}
    table = folder / "simulation_throughputs.json"
    table.write_text(json.dumps({"v100": alone, "k80": {one: {"null": 1.0}}}))
    lines = [
        ["A3C", "run", "d", "-n", "0", "2000", "1", "1.0", "-1", "0"],
        ["LM (batch size 5)", "run", "d", "-n", "0", "3000", "2", "1.0", "1.2", "10"],
    ]
    path = folder / "small.trace"
    path.write_text("\n".join("\t".join(line) for line in lines) + "\n")
    return path, [path, table]


def cluster(folder):
    """A cluster as JSON, on which synthetic jobs run."""
    nodes = [Node(name=f"n{i}", kind="t4", num_devices=4, withheld=(i,)) for i in range(3)]
    kept = Reservation(node="n0", num_devices=1, start_s=0.0, end_s=100.0)
    spec = ClusterSpec(
        nodes=tuple(nodes), reservations=(kept,), price_per_hour={"t4": 1.5}, quota={"a": 4}
    )
    path = folder / "cluster.json"
    path.write_text(dumps(spec))
    return path, [path]


LAYOUTS = {
    "pollux": (pollux, ["tiresias", "pollux", "optimus", "goodput"]),
    "gavel": (gavel, ["max-min", "fifo", "max-min-packed", "goodput"]),
    "cluster": (cluster, ["goodput", "sia", "static"]),
}


@pytest.mark.slow
@seeds
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_simulation_of_any_files(tmp_path, told, layout, seed):
    make, policies = LAYOUTS[layout]
    codes = set()
    for case in range(COUNT):
        draw = random.Random(f"{seed} {case} {layout}")
        folder = tmp_path / f"artifact{case}"
        folder.mkdir()
        path, files = make(folder)
        if case:  # the first files are whole
            damage(draw.choice(files), draw)
        rules = draw.choice(["own", "events", "realistic"])
        arguments = ["--policy", draw.choice(policies), "--rules", rules]
        if layout == "cluster":
            arguments += ["--workload", "synthetic:3", "--cluster", str(path)]
        else:
            arguments += ["--workload", str(path), "--restart-s", "5"]
        if layout == "gavel":
            arguments += ["--cluster", "v100:1x4,k80:1x4"]
        # A file or folder of it, a job, or what it asks for.
        names = (f"artifact{case}", "job", "--policy", "--cluster", "toy")
        codes.add(told(["simulate", *arguments], *names))
    assert codes == {0, 2}


SIMULATE = {
    "--policy": ["goodput", "static,sia", "fifo"],
    "--workload": ["synthetic:3", "synthetic", "synthetic:2"],
    "--cluster": ["2x4", "t4:2x4,a100:1x8", "aws:1x1"],
    "--rules": ["own", "events", "realistic", "pollux", "gavel", "sia"],
    "--restart-s": ["5", "0"],
    "--seed": ["7"],
    "--hours": ["0.2", "8"],
    "--speed": ["t4=2,a100=3", "z9=1"],
    "--out": ["out", "."],
}
RUN = {
    "--nproc-per-node": ["1", "2"],
    "--devices-per-process": ["1", "4"],
    "--max-restarts": ["0", "3"],
    "--grace-s": ["60", "0"],
}
COORDINATE = {
    "--num-processes": ["2"],
    "--host": ["localhost"],
    "--port": ["8123"],
    "--grace-s": ["9"],
}
COMMANDS = [
    "python train.py",
    "python -u -m mod",
    "train.py",
    "true",
    "python",
    "python -c pass",
    "nosuch",
]


def arguments_of(options, draw):
    """Some of the options, most of them with a value."""
    made = []
    for name, usual in options.items():
        if draw.random() < 0.5:
            made += [name, word(usual, draw)] if draw.random() < 0.9 else [name]
    return made


@seeds
def test_any_command_line(tmp_path, monkeypatch, told, seed):
    """What would be started is not; what it would be started with is as of ever."""
    ended = supervise.ProcessesEnd(code=0, told=False)
    monkeypatch.setattr(local, "supervise", lambda *_, **__: ended)
    monkeypatch.chdir(tmp_path)
    codes = set()
    for case in range(COUNT):
        draw = random.Random(f"{seed} {case}")
        what = draw.choice(["simulate", "run", "coordinate", "report", "", word(["run"], draw)])
        options = {"simulate": SIMULATE, "run": RUN, "coordinate": COORDINATE}.get(what, {})
        arguments = [what, *arguments_of(options, draw)]
        if what == "report" or draw.random() < 0.05:
            arguments.append(word([".", "nowhere"], draw))
        if what in ("run", "coordinate"):
            arguments += ["--", *word(COMMANDS, draw).split(" ")]
        codes.add(told(arguments))
    assert 2 in codes


@seeds
def test_any_change_of_a_setting(tmp_path, seed):
    whole = config(tmp_path)
    names = [
        "workdir",
        "base_steps",
        "epochs",
        "seed",
        "shuffle",
        "strategies",
        "loss",
        "rule",
        "policy",
    ]
    names += [
        "compute_dtype",
        "ema",
        "batch",
        "batch.micro",
        "batch.sizes",
        "batch.base",
        "batch.max_micro_batches",
    ]
    names += [
        "tuning.max_growth",
        "tuning",
        "saving.every_s",
        "saving.keep",
        "evaluation.every_s",
        "execution",
    ]
    usual = [
        '{"0": 16, "0.5": 32}',
        '[{"data": 8}, {"fsdp": 4}]',
        "bfloat16",
        "[1, 64]",
        "[1, 2]",
        "0.5",
        "16",
    ]
    usual += [
        '{"base": 16, "max": 32}',
        "goodput",
        "fixed",
        '{"every_s": 3}',
        "[[], {}]",
        "i4,(2,)f4",
    ]
    refused = 0
    for case in range(5 * COUNT):
        draw = random.Random(f"{seed} {case}")
        text = word(usual, draw)
        with contextlib.suppress(ValueError, RecursionError):  # damaged
            text = json.dumps(changed_json(json.loads(text), draw)) if draw.random() < 0.5 else text
        override = word([f"{draw.choice(names)}={text}"] * 9 + ["tuning"], draw)
        try:
            with_overrides(whole, [override])
        except ValueError as error:
            refused += 1
            assert re.search(r"\w{3,} .*\w{2,}", str(error)), override
        except Exception as error:
            raise AssertionError(override[:300]) from error
    assert refused


@seeds
def test_a_plan_of_any_script(tmp_path, seed):
    for case in range(COUNT // 4):
        draw = random.Random(f"{seed} {case}")
        script = tmp_path / f"train{case}.py"
        script.write_text("x = 1, 2\n")
        damage(script, draw)
        try:
            plan.trainer_of(str(script), [])
        except supervise.UsageError as error:
            assert str(error).startswith(str(script)) and len(str(error)) > len(str(script)) + 20
        except Exception as error:  # the script's own
            assert traceback.extract_tb(error.__traceback__)[-1].filename == str(script)
