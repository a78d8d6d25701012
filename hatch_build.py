"""The README as PyPI shows it: links and pictures are absolute, as no files lie beside it there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_PICTURES = (".svg", ".png")
_TARGET = re.compile(r'(\]\(|(?:src|srcset|href)=")(?!https?:|mailto:|#)([^)"]+)')


def absolute_links(text: str, source: str) -> str:
    """Return Markdown whose links to files of a repository lead to GitHub.

    Args:
        text: The Markdown.
        source: The address of the repository.
    """
    raw = source.replace("https://github.com/", "https://raw.githubusercontent.com/")

    def absolute(found: re.Match[str]) -> str:
        before, path = found.groups()
        is_picture = path.partition("#")[0].endswith(_PICTURES)
        return f"{before}{f'{raw}/main' if is_picture else f'{source}/blob/main'}/{path}"

    return _TARGET.sub(absolute, text)


class CustomMetadataHook(MetadataHookInterface):
    """Fills in what `pyproject.toml` leaves out."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Add the README."""
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        text = absolute_links(text, metadata["urls"]["Source"])
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
