"""Docstrings as markdown: examples that begin with `>>>` become blocks, and `a[b][c]` is no link."""

import re

import griffe


class PlainDocstrings(griffe.Extension):
    """Rewrites every docstring as it is read."""

    def on_object(self, *, obj: griffe.Object, **kwargs) -> None:
        """Called for every module, class, function and attribute."""
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)


def as_markdown(text: str) -> str:
    """`text` with its examples fenced and its indices kept from being links."""
    found: list[str] = []
    inside = False
    for line in text.splitlines():
        starts = line.lstrip().startswith(">>> ")
        if starts and not inside:
            found += ["", "```pycon"]
        if inside and not line.strip():
            found.append("```")
        inside = (starts or inside) and bool(line.strip())
        found.append(line.lstrip() if inside else re.sub(r"\](?=\[)", r"]\\", line))
    return "\n".join([*found, "```"] if inside else found)
