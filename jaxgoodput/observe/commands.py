"""The commands that look at runs: `jaxgoodput report` and `jaxgoodput board`."""

import importlib.util
import json
import sys

from jaxgoodput._commands import DONE, Command, Commands, argument, port, switch, text, wrong

_WORKDIRS = argument("workdirs", "WORKDIR", "the --workdir of a run", nargs="+")


def add_commands(commands: Commands) -> None:
    """Register this room's commands."""
    commands.add(
        Command(
            name="report",
            action=_report,
            summary="print where the time of a run went and how its batch sizes performed",
            usage="jaxgoodput report WORKDIR [WORKDIR ...] [--json]",
            description="Print a table of a run: where the time went, which batch sizes were used, what the "
            "model predicted and what was measured. Several runs are printed side by side.",
            options=(
                _WORKDIRS,
                switch(
                    "--json",
                    help="print the numbers as JSON: an object, or a list for several runs",
                ),
            ),
        ),
        Command(
            name="board",
            action=_board,
            summary="show runs in TensorBoard, with the settings that their curves need",
            usage="jaxgoodput board WORKDIR [WORKDIR ...]",
            description="Start TensorBoard on runs, each named after its folder, and open a page on which "
            "the most important curves are pinned. Press Ctrl-C to stop it.",
            options=(
                _WORKDIRS,
                text(
                    "--port",
                    "PORT",
                    "port of the page (default: the first free one from 6006)",
                    type=port,
                ),
                switch("--no-browser", help="print the address instead of opening a browser"),
            ),
        ),
        order=20,
    )


def _report(options, command: list[str], parser) -> int:
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
    except (OSError, ValueError) as error:  # no such folder, or not the files of a run
        return wrong(error)
    return DONE


def _board(options, command: list[str], parser) -> int:
    import webbrowser

    from jaxgoodput.observe import board

    if importlib.util.find_spec("tensorboard") is None:
        return wrong(ValueError("TensorBoard is not installed: pip install tensorboard."))
    look = (lambda _: True) if options.no_browser else webbrowser.open
    try:
        return board.show(options.workdirs, look, port=options.port)
    except (OSError, ValueError) as error:
        return wrong(error)
