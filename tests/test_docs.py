"""The pages of the site: complete, and in step with the code. `mkdocs build` checks the links."""

import importlib.util
import json
import re
import shlex
import textwrap
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

import specjax
from specjax import cli
from specjax.cli import TRAIN
from specjax.cli.parser import flags_of
from specjax.loading.methods import METHODS

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
INLINE_COMMAND = re.compile(r"(?<!`)`(specjax [^`]* --[\w-]+ [^`]+)`")  # with an option's value
PAGES = [
    path for path in sorted(DOCS.rglob("*.md")) if "results" not in path.relative_to(DOCS).parts
]


@cache
def hooks():
    spec = importlib.util.spec_from_file_location("hooks", DOCS / "site" / "hooks.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def text_of(page: Path) -> str:
    """The Markdown that MkDocs gets for a page."""
    file = SimpleNamespace(src_uri=page.relative_to(DOCS).as_posix())
    return hooks().on_page_markdown(page.read_text(), SimpleNamespace(file=file))


def blocks(page: Path, language: str) -> list[str]:
    found = re.findall(rf"^( *)```{language}\n(.*?)^\1```", text_of(page), re.DOTALL | re.MULTILINE)
    return [textwrap.dedent(code) for _, code in found]


def entries(nav) -> list[str]:
    if isinstance(nav, str):
        return [nav]
    parts = nav.values() if isinstance(nav, dict) else nav
    return [name for part in parts for name in entries(part)]


def test_every_page_is_in_the_navigation_and_every_method_has_one():
    listed = entries(hooks().on_config(yaml.safe_load((ROOT / "mkdocs.yml").read_text()))["nav"])
    pages = [path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")]
    made = [f"notebooks/{path.stem}.md" for path in (ROOT / "notebooks").glob("*.ipynb")]
    assert sorted(listed) == sorted(pages + made)
    methods = [name for name in listed if name.startswith("methods/")]
    assert methods == ["methods/index.md", *(f"methods/{name}.md" for name in METHODS)]


@pytest.mark.parametrize("name", METHODS)
def test_the_page_of_a_method_holds_what_the_registry_says(name):
    text, row = text_of(DOCS / "methods" / f"{name}.md"), METHODS[name]
    assert text.startswith(f"# {name}\n\n**Needs** {row.needs}.")
    assert f"::: {row.drafter.__module__}.{row.drafter.__name__}\n" in text
    assert all(f"| `{setting}` |" in text for setting in row.settings)
    assert (f"specjax train {name} " in text) == (row.training is not None)
    if row.training:
        options = re.findall(r"^\| `(--[\w-]+)` \|", text, re.MULTILINE)
        assert options and set(options) <= set(flags_of(TRAIN.load()[name]))


def test_the_reference_has_every_public_name():
    text = text_of(DOCS / "api" / "specjax.md")
    assert re.findall(r"^::: specjax\.(\w+)$", text, re.MULTILINE) == specjax.__all__


def test_a_notebook_becomes_a_page_with_its_outputs():
    png = {"image/png": "iVBORw0KGgo=\n", "text/plain": "<Figure>"}
    outputs = [{"name": "stdout", "text": ["1\n", "2\n"]}, {"data": png}]
    cells = [
        {"cell_type": "markdown", "source": ["# Title\n", "Text."]},
        {"cell_type": "code", "source": ["print(1)"], "outputs": outputs},
    ]
    assert hooks().notebook_page({"cells": cells}).split("\n\n") == [
        "# Title\nText.",
        "```python\nprint(1)\n```",
        "```text\n1\n2\n```",
        "![Output of the cell above](data:image/png;base64,iVBORw0KGgo=)\n",
    ]


def test_snippets_compile_and_commands_parse(monkeypatch):
    parse, lines = cli.parse, set()

    def only_parse(*arguments):
        parse(*arguments)
        return SimpleNamespace(run=lambda: None)

    for page in PAGES:
        for code in blocks(page, "python"):
            compile(code, str(page), "exec")
        for code in blocks(page, "bash"):
            lines.update(code.replace("\\\n", "").splitlines())
        lines.update(INLINE_COMMAND.findall(text_of(page)))
    for notebook in (ROOT / "notebooks").glob("*.ipynb"):
        text = hooks().notebook_page(json.loads(notebook.read_text()))
        fenced = "".join(re.findall(r"^```\n(specjax .*?)^```", text, re.DOTALL | re.MULTILINE))
        lines.update(fenced.replace("\\\n", "").splitlines())
        lines.update(INLINE_COMMAND.findall(text))
    monkeypatch.setattr(cli, "parse", only_parse)
    for line in sorted(lines):
        for words in (shlex.split(command) for command in line.split("&&")):
            if words[:1] == ["specjax"]:
                assert cli.main(words[1:]) == 0, line
            if words[:2] == ["python", "-m"] and words[2].startswith(("benchmarks", "recipes")):
                assert importlib.util.find_spec(words[2]), line


def test_the_version_is_said_once_and_cited():
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert cited["version"] == specjax.__version__
    assert cited["license"] == "Apache-2.0"


def test_the_readme_is_short_and_its_links_lead_to_files():
    text = (ROOT / "README.md").read_text()
    names = re.findall(r"^\| \[`([\w-]+)`\]", text, re.MULTILINE)
    assert set(names) == METHODS.keys() - {"plain"}
    for name in names:
        row = METHODS[name]
        assert f"| [`{name}`](docs/methods/{name}.md) | {row.drafts} | {row.needs} |" in text
    assert text.count("\n") <= 100
    links = re.findall(r"\]\(([^)#]+)\)", text)
    assert links
    assert [link for link in links if "://" not in link and not (ROOT / link).exists()] == []
