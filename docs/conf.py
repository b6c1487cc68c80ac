"""How Sphinx builds the site: `make docs`. It works without a network and treats each warning as an error.

References to other projects (Python, torch, Lightning) need their inventories. They are read only where `DOCS_ONLINE=1` is
set, as the GitHub workflow does; elsewhere those names are shown without a link.
"""

import os
import re
import sys
from importlib.metadata import metadata
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "examples"))  # tutorials import from it

project = "lightning_echo"
author = "the lightning_echo developers"
copyright = author
release = version = metadata("lightning-echo")["Version"]
repository = dict(line.split(", ", 1) for line in metadata("lightning-echo").get_all("Project-URL"))["Source"]

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.intersphinx",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
]
exclude_patterns = ["_build"]
templates_path = ["_templates"]

# ------------------------------------------------------------------ references
# In docstrings, a name in single backticks is a link where it is one of ours, and otherwise shown as code.
default_role = "autolink"
nitpicky = True  # each reference of ours leads somewhere
online = os.environ.get("DOCS_ONLINE") == "1"
intersphinx_mapping = (
    {
        "python": ("https://docs.python.org/3", None),
        "torch": ("https://docs.pytorch.org/docs/stable", None),
        "lightning": ("https://lightning.ai/docs/pytorch/stable", None),
        "torchmetrics": ("https://lightning.ai/docs/torchmetrics/stable", None),
        "omegaconf": ("https://omegaconf.readthedocs.io/en/2.3_branch", None),
    }
    if online
    else {}
)
# What is not ours: types of other projects, and those of ours that no page speaks of.
nitpick_ignore_regex = [(r"py:.*", r"(?!lightning_echo\.\w+$).*")]

# ------------------------------------------------------------------ docstrings
autodoc_default_options = {"members": True, "show-inheritance": True}
autodoc_inherit_docstrings = False  # Lightning tells what its hooks are for
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autosummary_generate = True
autosummary_ignore_module_all = False
napoleon_google_docstring = True
napoleon_numpy_docstring = False

# ------------------------------------------------------------------ pages
myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 4
nb_execution_mode = "cache"  # a notebook runs again when it has changed, or in a fresh clone
nb_execution_raise_on_error = True
nb_execution_show_tb = True
nb_execution_timeout = 240  # seconds per cell
nb_merge_streams = True

# ------------------------------------------------------------------ the look
html_theme = "pydata_sphinx_theme"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_title = "lightning_echo"
html_sidebars = {"alternatives": []}  # it has no pages below it, and a wide table
html_show_sourcelink = False
html_theme_options = {
    "github_url": repository,
    "navbar_align": "left",
    "show_toc_level": 2,
    "secondary_sidebar_items": {"**": ["page-toc"], "about/works_with": [], "alternatives": []},  # their tables need the width
    "footer_start": ["copyright"],
    "footer_end": [],
}


def _lead_to_the_repository(app, docname, source):
    """Links from pages to files outside docs/ (`../examples/x.py`) lead to the repository; files must be there."""

    def target(match):
        path = (Path(app.srcdir) / docname).parent.joinpath(match[2]).resolve()
        if path.is_relative_to(ROOT / "docs") or not path.is_relative_to(ROOT):
            return match[0]
        if not path.exists():
            raise FileNotFoundError(f"docs/{docname}: {match[2]} is not in the repository")
        kind = "tree" if path.is_dir() else "blob"
        return f"{match[1]}({repository}/{kind}/main/{path.relative_to(ROOT)}{match[3] or ''})"

    source[0] = re.sub(r"(\])\((\.\.?/[^)#\s]+)(#[^)]*)?\)", target, source[0])


def setup(app):
    app.connect("source-read", _lead_to_the_repository)
