"""The site is built without a warning: every link leads somewhere, every name has its reference."""

import importlib.util
import os
import pathlib
import re
import subprocess
import sys

import pages
import pytest

import jaxgoodput

TOP = pages.TOP
LINK = re.compile(r"\]\((?!https?:|mailto:)([^)#\s]*)(?:#([^)\s]*))?\)")


def anchors(page: pathlib.Path) -> set[str]:
    """As GitHub and mkdocs make them of headings."""
    heads = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    plain = [
        re.sub(r"[^\w\- ]", "", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", h)).lower() for h in heads
    ]
    return {h.strip().replace(" ", "-") for h in plain}


@pytest.mark.parametrize("page", pages.PAGES, ids=lambda p: str(p.relative_to(TOP)))
def test_every_link_of_a_page_leads_to_a_file_and_a_heading(page):
    """In the repository, where pages are read as they are."""
    for target, anchor in LINK.findall(page.read_text()):
        there = (page.parent / target).resolve() if target else page
        assert there.exists(), f"{page.relative_to(TOP)} links to {target}, which is not there"
        if anchor and there.suffix == ".md":
            assert anchor in anchors(there), (
                f"{page.relative_to(TOP)}: no heading {target}#{anchor}"
            )


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("mkdocs") is None, reason="mkdocs is not installed (the extra `docs`)"
)
def test_the_site_is_built_strictly_and_has_every_promised_name(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path / "site"]
    done = subprocess.run(
        command,
        cwd=TOP,
        env={**os.environ, "JAX_PLATFORMS": "cpu", "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    made = "".join(p.read_text() for p in (tmp_path / "site" / "reference").rglob("*.html"))
    for name in jaxgoodput.__all__:
        assert re.search(rf'id="[\w.-]*{name}"', made), f"the reference has no {name}"
