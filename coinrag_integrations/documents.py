"""Read text, Markdown, HTML, PDF and JSON Lines files as documents. Knows no chunk and no model."""

from __future__ import annotations

import codecs
import json
import logging
import os
import re
import stat
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from coinrag_integrations.errors import DocumentError
from coinrag_integrations.pdf import read_pdf
from coinrag_integrations.types import Document, Scalar

if TYPE_CHECKING:
    import bs4

logger = logging.getLogger(__name__)

_HTML_SUFFIXES = frozenset({".html", ".htm"})
_SUFFIXES = frozenset({".txt", ".md", ".markdown", ".pdf", ".jsonl"}) | _HTML_SUFFIXES
_N_NAMES_SHOWN = 5

_TEXT_KEYS = ("text", "content", "page_content")
_ID_KEYS = ("document_id", "id")

_DROPPED_TAGS = ("script", "style", "nav", "noscript", "template", "title")
# Block elements that bs4's own list of them lacks.
_MORE_BLOCK_TAGS = frozenset({"body", "caption", "details", "option", "summary", "tr"})

ErrorHandler = Callable[[DocumentError], None]


def read_documents(
    paths: Iterable[Path], *, on_error: ErrorHandler | None = None
) -> Iterator[Document]:
    """Read files, and the files below folders in sorted order, one at a time.

    A document's id is the file's path below the folder that was given, or the file's name if it
    was given itself. Each line of a .jsonl file is a document: an object with "text" (or
    "content", or "page_content") and, if it has them, "document_id" (or "id") and "title"; a line
    without an id is called `<id of the file>#<line number>`. Below a folder, hidden files and
    links to folders are passed over, and so are files of other types, named in one warning.

    Args:
        paths: files and folders.
        on_error: is called instead of raising; that file, or that line of a .jsonl file, is
            skipped.

    Raises:
        DocumentError: a path is missing, unreadable, of another type, damaged or without text,
            or two documents have the same id.
    """
    report = on_error or _raise
    origins: dict[str, str] = {}
    for source in _sources(paths, report):
        for origin, document in _read(source, report):
            if document.document_id in origins:
                first = origins[document.document_id]
                report(_same_id(document.document_id, origin, first))
                continue
            origins[document.document_id] = origin
            yield document


@dataclass(frozen=True, slots=True, kw_only=True)
class _Source:
    """A file, and its name below the folder that was given."""

    path: Path
    name: str


def _raise(error: DocumentError) -> None:
    raise error


def _sources(paths: Iterable[Path], report: ErrorHandler) -> Iterator[_Source]:
    """Each file once, also if it is named twice or lies below two of the folders."""
    if isinstance(paths, str | os.PathLike):
        report(DocumentError(f"{paths}: one path is not a list of paths: pass [path]"))
        return
    seen: set[str] = set()
    for path in map(Path, paths):
        try:
            is_folder = stat.S_ISDIR(path.stat().st_mode)
        except (OSError, ValueError) as e:
            report(_unreadable(path, e))
            continue
        if not is_folder and path.suffix.lower() not in _SUFFIXES:
            report(_unknown_type(path))
            continue
        found = _below(path, report) if is_folder else [_Source(path=path, name=path.name)]
        for source in found:
            real = os.path.realpath(source.path)
            if real not in seen:
                seen.add(real)
                yield source


def _below(root: Path, report: ErrorHandler) -> list[_Source]:
    found: list[_Source] = []
    skipped: list[str] = []

    def unreadable(e: OSError) -> None:
        report(_unreadable(Path(e.filename or root), e))

    for folder, folders, files in os.walk(root, onerror=unreadable):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for path in (Path(folder, name) for name in files if not name.startswith(".")):
            name = path.relative_to(root).as_posix()
            if path.suffix.lower() in _SUFFIXES:
                found.append(_Source(path=path, name=name))
            else:
                skipped.append(name)
    if skipped:
        shown = ", ".join(sorted(skipped)[:_N_NAMES_SHOWN])
        more = ", …" if len(skipped) > _N_NAMES_SHOWN else ""
        logger.warning("%s: skipped %d files of other types: %s%s", root, len(skipped), shown, more)
    return sorted(found, key=lambda source: source.name.split("/"))


def _read(source: _Source, report: ErrorHandler) -> Iterator[tuple[str, Document]]:
    """The documents of a file, each with the place it comes from."""
    if source.path.suffix.lower() == ".jsonl":
        yield from _read_json_lines(source, report)
        return
    try:
        document = _read_file(source)
    except DocumentError as error:
        report(error)
    else:
        yield str(source.path), document


def _read_file(source: _Source) -> Document:
    suffix = source.path.suffix.lower()
    if suffix == ".pdf":
        return _read_pdf(source)
    if suffix in _HTML_SUFFIXES:
        return _read_html(source)
    return _document(source, text=_decoded(_bytes(source.path), source.path))


def _read_html(source: _Source) -> Document:
    import bs4
    from bs4.dammit import EncodingDetector

    data = _bytes(source.path)
    declared = EncodingDetector.find_declared_encoding(data, is_html=True)
    markup = _decoded(data, source.path, declared=declared)
    try:
        with warnings.catch_warnings():
            # They guess from the content that a path or XML was meant; the suffix says HTML.
            warnings.simplefilter("ignore", bs4.MarkupResemblesLocatorWarning)
            warnings.simplefilter("ignore", bs4.XMLParsedAsHTMLWarning)
            soup = bs4.BeautifulSoup(markup, "html.parser")
    except (bs4.exceptions.ParserRejectedMarkup, ValueError) as e:  # also enormous numbers
        raise DocumentError(f"{source.path}: damaged HTML ({e}): repair the file") from e
    title = soup.title.get_text(" ", strip=True) if soup.title else ""
    return _document(source, text=_visible_text(soup), title=" ".join(title.split()))


def _visible_text(soup: bs4.BeautifulSoup) -> str:
    """The text of a page: blank lines between block elements, tabs between table cells.

    In one pass and without changing the tree: what bs4 inserts it follows down to the deepest element.
    """
    from bs4.element import NavigableString, Tag

    parts: list[str] = []
    open_tags: list[Tag] = []
    n_dropped = n_verbatim = 0  # open tags whose text is left out, or kept as it is

    for element in (*soup.descendants, None):
        while open_tags and (element is None or element.parent is not open_tags[-1]):
            tag = open_tags.pop()
            n_dropped -= tag.name in _DROPPED_TAGS
            n_verbatim -= tag.name == "pre"
            parts.append("" if n_dropped else _around(tag.name, ends=True))
        if isinstance(element, Tag):
            open_tags.append(element)
            parts.append("" if n_dropped else _around(element.name))
            n_dropped += element.name in _DROPPED_TAGS
            n_verbatim += element.name == "pre"
        elif type(element) is NavigableString and not n_dropped:
            text = str(element)
            parts.append(text if n_verbatim else re.sub(r"[ \t\r\n\f]+", " ", text))
    text = "\n".join(line.strip(" \t\r") for line in "".join(parts).split("\n"))
    return re.sub(r"\n{3,}", "\n\n", re.sub(r" {2,}", " ", text)).strip()


def _around(name: str, *, ends: bool = False) -> str:
    """What stands where a tag begins or ends."""
    from bs4.builder import HTMLTreeBuilder

    if name in HTMLTreeBuilder.DEFAULT_BLOCK_ELEMENTS or name in _MORE_BLOCK_TAGS:
        return "\n\n"
    if ends:
        return "\t" if name in ("td", "th") else ""
    return "\n" if name == "br" else ""


def _read_pdf(source: _Source) -> Document:
    text, title, n_pages = read_pdf(source.path, _bytes(source.path))
    return _document(source, text=text, title=title, n_pages=n_pages)


def _read_json_lines(source: _Source, report: ErrorHandler) -> Iterator[tuple[str, Document]]:
    for number, line in _lines(source.path, report):
        origin = f"{source.path}:{number}"
        try:
            document = _parse_line(source, line, number, origin)
        except DocumentError as error:
            report(error)
        else:
            yield origin, document


def _lines(path: Path, report: ErrorHandler) -> Iterator[tuple[int, bytes]]:
    """The lines that are not blank, numbered from 1, in UTF-8.

    Only line feeds end a line: JSON strings may hold the other breaks.
    """
    blank = True
    try:
        with path.open("rb") as file:
            lines: Iterable[bytes] = file
            if file.read(2) in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
                lines = _decoded(_bytes(path), path).encode().split(b"\n")
            file.seek(0)
            for number, line in enumerate(lines, start=1):
                if line.removeprefix(codecs.BOM_UTF8).strip():
                    blank = False
                    yield number, line
    except OSError as e:
        report(_unreadable(path, e))
    except DocumentError as error:
        report(error)
    else:
        if blank:
            report(DocumentError(f"{path}: there is no text in it: remove it"))


def _parse_line(source: _Source, line: bytes, number: int, origin: str) -> Document:
    try:
        value = json.loads(line.decode("utf-8-sig"))
    except (ValueError, RecursionError) as e:
        raise DocumentError(f"{origin}: not a JSON object in UTF-8 ({e}): correct the line") from e
    if not isinstance(value, dict):
        raise DocumentError(f"{origin}: a JSON {type(value).__name__}: write one object a line")
    text = next((value[key] for key in _TEXT_KEYS if key in value), None)
    if not isinstance(text, str):
        keys = ", ".join(map(repr, value)) or "no keys"
        raise DocumentError(f'{origin}: no string under "text" (found {keys:.200}): add it')
    document_id = next((value[key] for key in _ID_KEYS if value.get(key) is not None), None)
    if document_id is None:
        document_id = f"{source.name}#{number}"
    if isinstance(document_id, bool) or not isinstance(document_id, str | int):
        raise DocumentError(f"{origin}: the id {document_id!r:.80} must be a string or an integer")
    title = value.get("title")
    if title is not None and not isinstance(title, str):
        raise DocumentError(f"{origin}: the title {title!r:.80} must be a string")
    return _document(
        source, text=text, title=title or "", document_id=str(document_id), origin=origin
    )


def _document(
    source: _Source,
    *,
    text: str,
    title: str = "",
    document_id: str | None = None,
    origin: str | None = None,
    n_pages: int | None = None,
) -> Document:
    """A document whose strings can be stored anywhere.

    Raises:
        DocumentError: no text, no id, or a string with NUL or an unpaired surrogate.
    """
    origin = origin or str(source.path)
    name = source.name if document_id is None else document_id
    if not text.strip():
        raise DocumentError(f"{origin}: there is no text in it: remove it")
    if not name.strip():
        raise DocumentError(f"{origin}: the id is blank: give one, or leave it out")
    metadata: dict[str, Scalar] = {"source": source.path.as_posix()}
    if title.strip():
        metadata["title"] = title
    if n_pages is not None:
        metadata["pages"] = n_pages
    checked = {"text": text, "id": name, "title": title, "path": source.path.as_posix()}
    for part, string in checked.items():
        if bad := re.search("[\0\ud800-\udfff]", string):
            raise DocumentError(
                f"{origin!a}: the {part} holds {bad[0]!a} at character {bad.start()}, which "
                "databases cannot store: remove it"
            )
    return Document(document_id=name, text=text, metadata=metadata)


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as e:
        raise _unreadable(path, e) from e


def _decoded(data: bytes, path: Path, *, declared: str | None = None) -> str:
    """Text in UTF-8, in UTF-16 with a byte order mark, or else in the encoding it declares."""
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        encoding = "utf-16"
    elif b"\0" in data:
        raise DocumentError(
            f"{path}: byte {data.index(0)} is NUL, so it is binary, or UTF-16 without a byte order "
            "mark: save it as UTF-8 text"
        )
    else:
        encoding = "utf-8-sig"
    try:
        return data.decode(encoding)
    except UnicodeDecodeError as e:
        if declared and encoding == "utf-8-sig":
            try:
                return data.decode(declared)
            except (UnicodeError, LookupError):
                logger.debug("%s: declares %s, but is not in it", path, declared)
        raise DocumentError(
            f"{path}: byte {e.start} is not {encoding.removesuffix('-sig').upper()}: save it as "
            "UTF-8 text, for example with iconv -t utf-8"
        ) from e


def _unreadable(path: Path, e: OSError | ValueError) -> DocumentError:
    if isinstance(e, FileNotFoundError):
        return DocumentError(f"{path}: no such file or folder: check the path")
    if isinstance(e, PermissionError):
        return DocumentError(f"{path}: no permission to read it: change its mode or owner")
    return DocumentError(f"{path}: cannot be read ({e}): check the path and the disk")


def _unknown_type(path: Path) -> DocumentError:
    known = " ".join(sorted(_SUFFIXES))
    return DocumentError(f"{path}: files of this type are not read: convert it to one of {known}")


def _same_id(document_id: str, origin: str, first: str) -> DocumentError:
    return DocumentError(
        f"{origin}: the id {document_id!r} is that of {first} already: rename one of them, or "
        "read the folder that holds both"
    )
