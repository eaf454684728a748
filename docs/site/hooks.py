"""Fills the pages of methods and of the API from the package, so that they cannot go stale.

A page `methods/NAME.md` holds only prose: the table of facts, the settings, the training and the
docstrings come from the method's row in `specjax.loading.methods`. `{{ methods }}` becomes the list
of all methods, `{{ recipes }}` and `{{ data }}` what `specjax reproduce` has, and
`{{ api: MODULE }}` the public names of a module. Every notebook becomes a page, with the outputs
it holds: to have some, execute copies and name their folder in SPECJAX_NOTEBOOKS.
"""

import inspect
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import specjax
from recipes.papers.estimate import rows
from recipes.papers.recipe import shared_data
from specjax.core.settings import field_texts
from specjax.decoding import Drafter
from specjax.loading.hub import pocket_folder
from specjax.loading.methods import METHODS, Method
from specjax.models.families import read_config
from specjax.training import OptimizerOptions

API = re.compile(r"\{\{ api: ([\w.]+) \}\}")
PAGE = re.compile(r"methods/([\w-]+)\.md")
PAGES = Path(__file__).parent.parent / "methods"
MAX_SHOWN = 60  # characters of a default
NOTEBOOKS = Path(os.environ.get("SPECJAX_NOTEBOOKS", PAGES.parent.parent / "notebooks"))


def on_config(config: Any) -> Any:
    """Called by MkDocs with its configuration; adds the pages of all methods to the navigation."""
    for section in config["nav"]:
        pages = next(iter(section.values())) if isinstance(section, dict) else ()
        if "methods/index.md" in pages:
            pages += [f"methods/{name}.md" for name in METHODS]
    return config


def on_files(files: Any, config: Any) -> Any:
    """Called by MkDocs with all files; adds a page for each notebook."""
    from mkdocs.structure.files import File  # tests of this module do without MkDocs

    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        page = notebook_page(json.loads(path.read_text()))
        files.append(File.generated(config, f"notebooks/{path.stem}.md", content=page))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Called by MkDocs with the text of each page."""
    found = PAGE.fullmatch(page.file.src_uri)
    if found and found[1] in METHODS:
        markdown = method_page(found[1], markdown)
    if "{{ methods }}" in markdown:
        markdown = markdown.replace("{{ methods }}", methods_list())
    for name, make in {"recipes": recipes, "data": data_sets}.items():
        if f"{{{{ {name} }}}}" in markdown:
            markdown = markdown.replace(f"{{{{ {name} }}}}", make())
    return API.sub(lambda found: api_entries(found[1]), markdown)


def notebook_page(notebook: Mapping[str, Any]) -> str:
    """Returns a notebook as Markdown."""
    parts = []
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
        else:
            parts += [f"```python\n{source}\n```", *map(output, cell["outputs"])]
    return "\n\n".join(parts) + "\n"


def output(found: Mapping[str, Any]) -> str:
    """Returns an output of a cell: a picture, HTML, or text."""
    data = {kind: "".join(text) for kind, text in found.get("data", {}).items()}
    if picture := data.get("image/png"):
        return f"![Output of the cell above](data:image/png;base64,{picture.strip()})"
    if html := data.get("text/html"):
        return f"<div>{html}</div>"
    text = data.get("text/plain") or "".join(found.get("text", ()))
    return f"```text\n{text.rstrip()}\n```" if text and found.get("name") != "stderr" else ""


def methods_list() -> str:
    """Returns a list of all methods: the first sentence of each page, and what the method needs."""
    lines = []
    for name, method in METHODS.items():
        prose = (PAGES / f"{name}.md").read_text().partition("\n\n")[2].partition("\n\n")[0]
        first = re.split(r"(?<=\.)\s", prose)[0].replace("\n", " ")
        lines.append(f"- [**{name}**]({name}.md): {first} Needs {method.needs}.")
    return "\n".join(lines)


def recipes() -> str:
    """Returns the table of recipes: commands, and what they cost."""
    header, *lines = rows()
    shown = [(f"`specjax reproduce {name}`", *rest) for name, *rest in lines]
    return table(("command", *header[1:]), shown)


def data_sets() -> str:
    """Returns the table of data sets: where they are, and their licenses."""
    found: dict[tuple[str, ...], tuple[str, str]] = {}
    for each in shared_data().values():
        found.setdefault(each.files, (f"[{each.title.split(',')[0]}]({each.page})", each.license))
    return table(
        ("files in the folder of `--data`", "data", "license"),
        [(", ".join(f"`{name}`" for name in files), *rest) for files, rest in found.items()],
    )


def method_page(name: str, prose: str) -> str:
    """Returns the page of a method: its title, the facts, the prose, and what the code says."""
    method = METHODS[name]
    title, _, rest = prose.partition("\n")
    facts = f"**Needs** {method.needs}."
    if method.training:
        facts += f" **Trained by** `specjax train {name}`."
    parts = [title, facts, rest.strip(), "## Settings", settings(name, method)]
    if method.training:
        parts += ["## Training", *training(name, method.training)]
    parts += ["## The drafter", *docstrings(method.drafter)]
    return "\n\n".join(parts) + "\n"


def settings(name: str, method: Method) -> str:
    """Returns the table of a method's settings."""
    if not method.settings:
        return "None."
    fitted = method.settings_for(read_config(pocket_folder()))
    texts = field_texts(method.drafter)
    columns: dict[str, Callable[[str, Any], str]] = {
        "setting": lambda name, _: f"`{name}`",
        "default": lambda name, value: "depends on the target" if name in fitted else shown(value),
    }
    text = (
        "Set them with `--set NAME=VALUE` on the command line, or as keywords of "
        f"`specjax.load_drafter({name!r}, target)`."
    )
    if method.tuned:
        columns["tuned"] = lambda name, _: "yes" if name in method.tuned else ""
        text += " `specjax tune` finds those marked as tuned."
    if texts:
        columns["meaning"] = lambda name, _: texts.get(name, "")
    else:
        text += " The description of the drafter, below, explains them."
    rows = [
        tuple(cell(*setting) for cell in columns.values()) for setting in method.settings.items()
    ]
    return f"{text}\n\n{table(tuple(columns), rows)}"


def training(name: str, objective: Any) -> Iterator[str]:
    """Yields the training's own words, its command, and its options."""
    yield f"```bash\nspecjax train {name} --target TARGET --data chats.jsonl --out runs/{name}\n```"
    yield inspect.getdoc(inspect.getmodule(objective)) or ""
    texts = field_texts(objective)
    yield table(
        ("option", "default", "meaning"),
        [
            (
                flag(each.name, each.default),
                "" if isinstance(each.default, bool) else shown(each.default),
                texts[each.name],
            )
            for each in fields(objective)
        ],
    )
    common = OptimizerOptions()
    own = {
        each.name: value
        for each in fields(common)
        if (value := getattr(objective.optimizer, each.name)) != getattr(common, each.name)
    }
    if objective.epochs:
        own["epochs"] = objective.epochs
    if own:
        pairs = [f"{flag(key)} {value}" for key, value in own.items()]
        yield f"Defaults of the run that differ from the common ones: {', '.join(pairs)}."
    yield "[Train a head](../guides/train-a-head.md) has the rest."


def docstrings(drafter: type[Drafter]) -> Iterator[str]:
    """Yields references to the drafter's docstring, and to those of bases that have settings.

    Several pages show the same ones, so none of them is a target of cross-references.
    """
    options = "{members: false, heading_level: 3, skip_local_inventory: true}"
    for each in drafter.__mro__:
        own = {field.name for field in fields(each)} if is_dataclass(each) else set()
        if each is drafter or own & set(inspect.get_annotations(each)) - {"head"}:
            yield f"::: {each.__module__}.{each.__qualname__}\n    options: {options}"


def api_entries(module: str) -> str:
    """Returns references to a module's public names, without those that `specjax` has too."""
    found = import_module(module)
    known = [] if found is specjax else [getattr(specjax, name) for name in specjax.__all__]
    names = [name for name in found.__all__ if getattr(found, name) not in known]
    return "\n\n".join(f"::: {module}.{name}" for name in names)


def shown(value: Any) -> str:
    """Returns how a default is shown: long tuples by their length."""
    if value is MISSING:
        return ""
    text = repr(value)
    return f"{len(value)} entries" if len(text) > MAX_SHOWN else f"`{text}`"


def flag(name: str, default: Any = None) -> str:
    """Returns the flag of an option; one that is on by default can only be turned off."""
    return f"`--{'no-' * (default is True)}{name.replace('_', '-')}`"


def table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """Returns a Markdown table."""
    lines = [header, ("---",) * len(header), *rows]
    cells = ([cell.replace("|", r"\|") for cell in line] for line in lines)
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)
