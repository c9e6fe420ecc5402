"""Check that the local links in Markdown documents resolve, anchors included.

    python -m scripts.check_links                 # README.md, the other root pages, docs/, models/
    python -m scripts.check_links docs/design.md  # these only

Links to other sites are left alone: this check needs no network. Exits with 1 if a link is dead.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote

DOCUMENTS = ("*.md", "docs/**/*.md", "models/**/*.md", "examples/**/*.md")

_FENCE = re.compile(r"^ {0,3}(```+|~~~+).*?^ {0,3}\1[`~]*\s*?$", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"(`+)(?!`).+?(?<!`)\1(?!`)", re.DOTALL)
_INLINE_LINK = re.compile(r"\]\(\s*<?([^)\s>]+)>?(?:\s+[\"'][^)]*)?\s*\)")
_REFERENCE = re.compile(r"^ {0,3}\[[^\]^][^\]]*\]:\s*<?([^\s>]+)", re.MULTILINE)
_HTML_LINK = re.compile(r"<(?:a|img|source)\b[^>]*?\b(?:href|src|srcset)=\"([^\"\s]+)\"")
_HEADING = re.compile(r"^ {0,3}#{1,6}\s+(.+?)\s*#*\s*$", re.MULTILINE)
_HTML_ANCHOR = re.compile(r"<[^>]+\b(?:id|name)=\"([^\"]+)\"")
_EXTERNAL = re.compile(r"^(?:[a-z][a-z0-9+.-]*:|//)", re.IGNORECASE)


def main(arguments: list[str]) -> int:
    """Check the documents named, or all of them, and print what is dead."""
    documents = [Path(argument) for argument in arguments] or _find_documents(Path())
    dead = [f"{document}: {problem}" for document in documents for problem in check(document)]
    print("\n".join(dead) or f"{len(documents)} documents, no dead links")
    return 1 if dead else 0


def check(document: Path) -> Iterator[str]:
    """Yield a message for each local link of the document that leads nowhere."""
    for link in _links(_FENCE.sub("", document.read_text(encoding="utf-8"))):
        path, _, anchor = unquote(link).partition("#")
        target = document.parent / path if path else document
        if not target.exists():
            yield f"no such file: {link}"
        elif anchor and target.suffix == ".md" and anchor not in _anchors(target):
            yield f"no such heading: {link}"


def _find_documents(root: Path) -> list[Path]:
    return sorted({path for pattern in DOCUMENTS for path in root.glob(pattern)})


def _links(text: str) -> Iterator[str]:
    text = _CODE.sub("", text)
    for pattern in (_INLINE_LINK, _REFERENCE, _HTML_LINK):
        for link in pattern.findall(text):
            if not _EXTERNAL.match(link):
                yield link


def _anchors(document: Path) -> set[str]:
    """Anchors as GitHub makes them: lower case, hyphens for spaces, a number for repeats."""
    text = _FENCE.sub("", document.read_text(encoding="utf-8"))
    anchors = set(_HTML_ANCHOR.findall(text))
    for heading in _HEADING.findall(text):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        slug = re.sub(r"[^\w\- ]", "", words).replace(" ", "-")
        repeats = (f"{slug}-{number}" for number in range(1, 1000))
        anchors.add(slug if slug not in anchors else next(s for s in repeats if s not in anchors))
    return anchors


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
