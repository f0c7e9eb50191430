"""What the site adds to the pages in ``docs/``: the notebooks, other files that pages link to, and
the table of sampling parameters.

A page links to ``../notebooks/caches.ipynb`` in the repository. The site stores a copy of that file
next to its pages, as ``notebooks/caches.ipynb``, and this module rewrites the link.
"""

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from kvjax.sampling.params import PARAMS, SamplingParams

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("CHANGELOG.md", "CONTRIBUTING.md")
"""Pages at the root of the repository."""
PARAMETERS = "<!-- sampling parameters -->"
"""Where a page has the table of sampling parameters."""
LINK = re.compile(r"\[([^\]]*)\]\(([^)#\s:]+)(#[^)\s]*)?\)")


def repository_path(page: str, link: str) -> str:
    """The path, from the root of the repository, of the target of a page's link."""
    own = f"docs/{page}" if (ROOT / "docs" / page).exists() else page
    return posixpath.normpath(posixpath.join(posixpath.dirname(own), link))


def at_root(path: str, config: MkDocsConfig) -> File:
    """A file outside ``docs/``."""
    return File(path, str(ROOT), config.site_dir, config.use_directory_urls)


@event_priority(100)  # before the plugin that converts notebooks
def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the notebooks, the pages at the root, and every other file that a page links to."""
    for path in (*PAGES, *(str(p.relative_to(ROOT)) for p in (ROOT / "notebooks").glob("*.ipynb"))):
        files.append(at_root(path, config))
    pages = [page for page in files.documentation_pages() if page.src_uri.endswith(".md")]
    while pages:
        page = pages.pop()
        for _, link, _ in LINK.findall(page.content_string):
            path = repository_path(page.src_uri, link)
            outside = not path.startswith("docs/") and path not in files.src_uris
            if outside and (ROOT / path).is_file():
                added = at_root(path, config)
                files.append(added)
                pages += [added] if path.endswith(".md") else []
    return files


def parameter_table() -> str:
    """The sampling parameters, in the order in which they are declared."""
    defaults = SamplingParams()
    rows = [
        f"| `{name}` | {getattr(defaults, name)} | {param.help} Must be {param.range}. |"
        for name, param in PARAMS.items()
    ]
    return "\n".join(["| parameter | default | effect |", "| --- | --- | --- |", *rows])


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Fill in the table of sampling parameters, and rewrite links to files of the repository. A
    link to a file that exists there but not on the site becomes plain text."""
    here = page.file.src_uri

    def follow(match: re.Match[str]) -> str:
        text, link, anchor = match.groups()
        path = repository_path(here, link)
        uri = path.removeprefix("docs/")
        if uri in files.src_uris:
            return (
                f"[{text}]({posixpath.relpath(uri, posixpath.dirname(here) or '.')}{anchor or ''})"
            )
        return text if (ROOT / path).exists() else match[0]

    if PARAMETERS in markdown:
        markdown = markdown.replace(PARAMETERS, parameter_table())
    return LINK.sub(follow, markdown)
