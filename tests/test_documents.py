import io
import json
import logging
import os
from pathlib import Path

import pypdf
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coinrag_integrations.documents import read_documents
from coinrag_integrations.errors import DocumentError

LONE_SURROGATE = '{"text": "half \\ud800 a pair"}'


def pdf_bytes(*pages: str, title: str = "") -> bytes:
    """A minimal PDF with one line of text a page."""
    kids = " ".join(f"{4 + 2 * i} 0 R" for i in range(len(pages)))
    objects = [
        "<< /Type /Catalog /Pages 2 0 R >>",
        f"<< /Type /Pages /Kids [{kids}] /Count {len(pages)} >>",
        "<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
    ]
    for i, text in enumerate(pages):
        stream = f"BT /F1 12 Tf 72 720 Td ({text}) Tj ET" if text else ""
        objects.append(
            "<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] "
            f"/Resources << /Font << /F1 3 0 R >> >> /Contents {5 + 2 * i} 0 R >>"
        )
        objects.append(f"<< /Length {len(stream)} >>\nstream\n{stream}\nendstream")
    objects.append(f"<< /Title ({title}) >>")

    body, starts = b"%PDF-1.4\n", []
    for number, content in enumerate(objects, start=1):
        starts.append(len(body))
        body += f"{number} 0 obj\n{content}\nendobj\n".encode("latin-1")
    table = "".join(f"{start:010} 00000 n \n" for start in starts)
    trailer = (
        f"xref\n0 {len(objects) + 1}\n0000000000 65535 f \n{table}"
        f"trailer\n<< /Size {len(objects) + 1} /Root 1 0 R /Info {len(objects)} 0 R >>\n"
        f"startxref\n{len(body)}\n%%EOF\n"
    )
    return body + trailer.encode("latin-1")


def read_one(path: Path, content: bytes | str):
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    (document,) = read_documents([path])
    return document


def refusal(path: Path, content: bytes | str | None = None) -> str:
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DocumentError) as caught:
        list(read_documents([path]))
    message = str(caught.value)
    assert str(path) in message
    return message


def test_a_text_file_is_read_as_it_is(tmp_path):
    document = read_one(tmp_path / "a.txt", "One\r\ntwo\tthree\x0b\x1f.\n")
    assert document.text == "One\r\ntwo\tthree\x0b\x1f.\n"
    assert document.document_id == "a.txt"
    assert document.metadata == {"source": (tmp_path / "a.txt").as_posix()}


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
@pytest.mark.parametrize("name", ["a.txt", "a.MD", "a.markdown"])
def test_unicode_encodings_are_recognised(tmp_path, name, encoding):
    assert read_one(tmp_path / name, "Gráinne 東京 😀".encode(encoding)).text == "Gráinne 東京 😀"


def test_a_folder_is_read_recursively_in_sorted_order(tmp_path, caplog):
    for name in ("b.txt", "a/z.md", "a/b/c.txt", ".hidden/x.txt", ".x.txt", "p.png", "q.bin"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    with caplog.at_level(logging.WARNING):
        documents = list(read_documents([tmp_path]))
    assert [document.document_id for document in documents] == ["a/b/c.txt", "a/z.md", "b.txt"]
    (record,) = caplog.records
    assert "skipped 2 files of other types: p.png, q.bin" in record.getMessage()


def test_a_file_named_twice_is_read_once(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("text")
    assert len(list(read_documents([path, tmp_path, tmp_path / "." / "a.txt"]))) == 1


def test_two_documents_with_one_id_are_refused(tmp_path):
    for folder in ("x", "y"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.txt").write_text(folder)
    with pytest.raises(DocumentError, match=r"the id 'a.txt' is that of .*x/a.txt already"):
        list(read_documents([tmp_path / "x", tmp_path / "y"]))
    errors: list[DocumentError] = []
    kept = list(read_documents([tmp_path / "x", tmp_path / "y"], on_error=errors.append))
    assert [document.text for document in kept] == ["x"]
    assert len(errors) == 1
    assert {d.document_id for d in read_documents([tmp_path])} == {"x/a.txt", "y/a.txt"}


def test_html_gives_its_visible_text(tmp_path):
    document = read_one(
        tmp_path / "a.html",
        "<!doctype html><html><head><title>The\n town</title><style>p {}</style><body>"
        "<nav>Home | About</nav><h1>The town</h1><p>It lies <b>by</b> the\n  sea.<p>It is&nbsp;old."
        "<script>alert('no')</script><ul><li>one<li>two</ul><!-- not this -->a<br>b"
        "<table><tr><td>x</td><td>y</td></tr></table><pre>k = 1\nm = 2</pre>",
    )
    assert document.metadata["title"] == "The town"
    assert document.text == (
        "The town\n\nIt lies by the sea.\n\nIt is\xa0old.\n\none\n\ntwo\n\na\nb\n\nx\ty\n\n"
        "k = 1\nm = 2"
    )


def test_html_is_read_in_the_encoding_that_it_declares(tmp_path):
    page = '<meta charset="iso-8859-1"><p>Gráinne</p>'
    assert read_one(tmp_path / "a.htm", page.encode("latin-1")).text == "Gráinne"
    # Many pages declare one encoding and are in UTF-8 all the same.
    assert read_one(tmp_path / "a.htm", page.encode()).text == "Gráinne"
    unknown = page.replace("iso-8859-1", "no-such").encode("latin-1")
    assert "is not UTF-8" in refusal(tmp_path / "a.htm", unknown)


@pytest.mark.parametrize(
    "page", ["just words", "/etc/hosts", '<?xml version="1.0"?><html><p>just words</p></html>']
)
def test_odd_html_gives_no_warnings(tmp_path, recwarn, page):
    assert read_one(tmp_path / "a.html", page).text
    assert not recwarn.list


def test_deeply_nested_html_is_read(tmp_path):
    assert read_one(tmp_path / "a.html", "<div>" * 3000 + "deep").text == "deep"


def test_a_pdf_gives_its_pages(tmp_path):
    document = read_one(tmp_path / "a.pdf", pdf_bytes("First page.", "", "Last.", title="Two"))
    assert document.text == "First page.\n\nLast."
    assert document.metadata == {
        "source": (tmp_path / "a.pdf").as_posix(),
        "title": "Two",
        "pages": 3,
    }


def test_an_encrypted_pdf_is_refused(tmp_path):
    writer = pypdf.PdfWriter(clone_from=io.BytesIO(pdf_bytes("Secret.")))
    writer.encrypt("password", algorithm="RC4-128")
    writer.write(tmp_path / "a.pdf")
    assert "encrypted: save a copy without a password" in refusal(tmp_path / "a.pdf")


def test_a_pdf_without_text_is_refused(tmp_path):
    assert "run OCR on it first" in refusal(tmp_path / "a.pdf", pdf_bytes("", ""))


@pytest.mark.parametrize("content", [b"", b"not a pdf", b"%PDF-1.4\n%%EOF", pdf_bytes("x")[:300]])
def test_a_damaged_pdf_is_refused(tmp_path, content):
    assert "the PDF is damaged" in refusal(tmp_path / "a.pdf", content)


def test_a_pdf_with_a_filter_that_pypdf_dropped_is_refused(tmp_path):
    content = pdf_bytes("x").replace(b"<< /Length", b"<< /Filter /Fl /Length")
    assert "the PDF is damaged" in refusal(tmp_path / "a.pdf", content)


@given(st.integers(0, 700), st.binary(min_size=1, max_size=4))
@settings(max_examples=60, deadline=None)
def test_a_pdf_with_wrong_bytes_is_read_or_refused(tmp_path_factory, at, junk):
    path = tmp_path_factory.mktemp("pdf") / "a.pdf"
    content = pdf_bytes("First page.", "Last.")
    path.write_bytes(content[:at] + junk + content[at + len(junk) :])
    errors: list[DocumentError] = []
    documents = list(read_documents([path], on_error=errors.append))
    assert len(documents) + len(errors) == 1


def test_each_line_of_json_lines_is_a_document(tmp_path):
    path = tmp_path / "data" / "a.jsonl"
    path.parent.mkdir()
    lines = [
        {"text": "One\u2028two", "id": "first", "title": "T"},
        {"content": "Three", "document_id": 7, "id": "other", "title": None},
        {"page_content": "Four", "more": [1]},
    ]
    text = "\n\n".join(json.dumps(line, ensure_ascii=False) for line in lines)
    for encoding in ("utf-8", "utf-8-sig", "utf-16"):
        path.write_bytes(text.encode(encoding))
        documents = list(read_documents([tmp_path]))
        assert [document.text for document in documents] == ["One\u2028two", "Three", "Four"]
        ids = [document.document_id for document in documents]
        assert ids == ["first", "7", "data/a.jsonl#5"]
        assert documents[0].metadata == {"source": path.as_posix(), "title": "T"}
        assert documents[1].metadata == {"source": path.as_posix()}


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{", "not a JSON object"),
        (b"\xff", "not a JSON object in UTF-8"),
        ("[" * 100_000, "not a JSON object"),
        ('["text"]', "a JSON list: write one object a line"),
        ('{"body": "x", "k": 1}', "no string under \"text\" (found 'body', 'k')"),
        ('{"text": 3}', 'no string under "text"'),
        ('{"text": " "}', "there is no text in it"),
        ('{"text": "x", "id": true}', "the id True must be"),
        ('{"text": "x", "id": " "}', "the id is blank"),
        ('{"text": "x", "id": [1]}', "the id [1] must be"),
        ('{"text": "x", "title": 3}', "the title 3 must be"),
        ('{"text": "a\\u0000b"}', "the text holds '\\x00' at character 1"),
        (LONE_SURROGATE, "the text holds '\\ud800' at character 5"),
        ('{"text": "x", "id": "\\udfff"}', "the id holds"),
        ('{"text": "x", "title": "\\udfff"}', "the title holds"),
    ],
)
def test_a_bad_line_is_refused_with_its_number(tmp_path, line, problem):
    good = b'{"text": "good"}\n'
    bad = line if isinstance(line, bytes) else line.encode()
    path = tmp_path / "a.jsonl"
    message = refusal(path, good + bad + b"\n" + good)
    assert f"{path}:2" in message
    assert problem in message
    errors: list[DocumentError] = []
    kept = list(read_documents([path], on_error=errors.append))
    assert [document.document_id for document in kept] == ["a.jsonl#1", "a.jsonl#3"]
    assert len(errors) == 1


def test_a_repeated_id_in_json_lines_is_refused(tmp_path):
    line = '{"text": "x", "id": "same"}\n'
    message = refusal(tmp_path / "a.jsonl", line * 2)
    assert "a.jsonl:2: the id 'same' is that of" in message


@pytest.mark.parametrize("suffix", [".txt", ".md", ".html", ".jsonl"])
@pytest.mark.parametrize("content", [b"", b" \n\n", b"\xef\xbb\xbf\n"])
def test_a_file_without_text_is_refused(tmp_path, suffix, content):
    assert "there is no text in it" in refusal(tmp_path / f"a{suffix}", content)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"\x89PNG\r\n\x1a\n\x00\x00", "byte 8 is NUL, so it is binary"),
        ("text".encode("utf-16-le"), "byte 1 is NUL"),
        ("Gráinne".encode("cp1252"), "byte 2 is not UTF-8: save it as UTF-8 text"),
        (b"\xff\xfea", "byte 2 is not UTF-16"),
        ("a\0b".encode("utf-16"), "the text holds '\\x00'"),
    ],
)
@pytest.mark.parametrize("suffix", [".txt", ".html"])
def test_what_is_no_text_is_refused(tmp_path, suffix, content, problem):
    assert problem in refusal(tmp_path / f"a{suffix}", content)


def test_paths_that_cannot_be_read_are_refused(tmp_path):
    assert "no such file or folder" in refusal(tmp_path / "none.txt")
    (tmp_path / "loop.txt").symlink_to(tmp_path / "loop.txt")
    assert "cannot be read" in refusal(tmp_path / "loop.txt")
    assert "convert it to one of .htm .html" in refusal(tmp_path / "a.docx", b"PK")
    (tmp_path / "gone.jsonl").symlink_to(tmp_path / "nowhere")
    errors: list[DocumentError] = []
    assert list(read_documents([tmp_path], on_error=errors.append)) == []
    assert len(errors) == 2


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_a_file_without_permission_is_refused(tmp_path, name):
    path = tmp_path / name
    path.write_text('{"text": "x"}')
    path.chmod(0)
    assert "no permission to read it" in refusal(path)


@pytest.mark.parametrize("paths", ["notes.txt", Path("notes.txt")])
def test_a_single_path_is_no_list_of_paths(paths):
    with pytest.raises(DocumentError, match=r"pass \[path\]"):
        list(read_documents(paths))


def test_errors_are_handed_over_and_reading_goes_on(tmp_path):
    (tmp_path / "a.pdf").write_bytes(b"broken")
    (tmp_path / "b.txt").write_bytes(b"\xff")
    (tmp_path / "c.txt").write_text("fine")
    errors: list[DocumentError] = []
    documents = list(read_documents([tmp_path / "none", tmp_path], on_error=errors.append))
    assert [document.text for document in documents] == ["fine"]
    assert [Path(str(error).split(":")[0]).name for error in errors] == ["none", "a.pdf", "b.txt"]


@given(st.binary(max_size=200), st.sampled_from([".txt", ".html", ".jsonl", ".pdf"]))
@settings(max_examples=200, deadline=None)
def test_any_bytes_are_read_or_refused(tmp_path_factory, content, suffix):
    path = tmp_path_factory.mktemp("any") / f"a{suffix}"
    path.write_bytes(content)
    errors: list[DocumentError] = []
    for document in read_documents([path], on_error=errors.append):
        document.text.encode()
        assert "\0" not in document.text


@given(st.text(alphabet="<>/!?[]-&;ab =\"'\n", max_size=80))
@settings(max_examples=200, deadline=None)
def test_any_markup_is_read_or_refused(tmp_path_factory, markup):
    path = tmp_path_factory.mktemp("html") / "a.html"
    path.write_text(markup)
    assert len(list(read_documents([path], on_error=lambda error: None))) <= 1
