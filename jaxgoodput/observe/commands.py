"""The commands that look at runs: `jaxgoodput report` and `jaxgoodput board`."""

import importlib.util
import json
import sys

from jaxgoodput._commands import Commands, argument, port, switch, text, wrong
from jaxgoodput._exits import DONE

_WORKDIRS = argument("workdirs", "WORKDIR", "the --workdir of a run", nargs="+")


def add_commands(commands: Commands) -> None:
    """Register the commands `report` and `board`."""
    json_numbers = switch(
        "--json", help="print the numbers as JSON: an object, or a list for several runs"
    )
    own_port = text(
        "--port", "PORT", "port of the page (default: the first free one from 6006)", type=port
    )
    no_browser = switch("--no-browser", help="print the address instead of opening a browser")
    usage = "jaxgoodput report WORKDIR [WORKDIR ...] [--json]"
    commands.add(20, "report", _report, usage, (_WORKDIRS, json_numbers))
    usage = "jaxgoodput board WORKDIR [WORKDIR ...]"
    commands.add(20, "board", _board, usage, (_WORKDIRS, own_port, no_browser))


def _report(options, command: list[str], parser) -> int:
    """Print where the time of a run went and how its batch sizes performed.

    The report is a table: where the time went, which batch sizes were used, what the model predicted and
    what was measured. Several runs are printed side by side.
    """
    from jaxgoodput.observe.report import compare, numbers, report

    # Boxes and curves need Unicode; a terminal without it gets the same table in ASCII.
    ascii = (sys.stdout.encoding or "ascii").lower().replace("-", "") not in ("utf8", "utf16")
    try:
        if options.json:
            found = [numbers(workdir) for workdir in options.workdirs]
            print(json.dumps(found if len(found) > 1 else found[0], indent=1))
        elif len(options.workdirs) > 1:
            print(compare(options.workdirs, ascii=ascii))
        else:
            print(report(options.workdirs[0], ascii=ascii))
    # There is no such folder, it has not the files of a run, or a bucket's library is not installed.
    except (OSError, ValueError, ModuleNotFoundError) as error:
        return wrong(error)
    return DONE


def _board(options, command: list[str], parser) -> int:
    """Show runs in TensorBoard, with the settings that their curves need.

    Each run is named after its folder. The page opens with the most important curves pinned. Press Ctrl-C to
    stop TensorBoard.
    """
    import webbrowser

    from jaxgoodput.observe import board

    if importlib.util.find_spec("tensorboard") is None:
        return wrong(ValueError("TensorBoard is not installed: pip install tensorboard."))
    look = (lambda _: True) if options.no_browser else webbrowser.open
    try:
        return board.show(options.workdirs, look, port=options.port)
    except (OSError, ValueError, ModuleNotFoundError) as error:
        return wrong(error)
