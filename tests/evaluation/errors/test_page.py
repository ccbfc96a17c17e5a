"""The page: what it says, that it escapes all of it, and what a real browser makes of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from bs4 import BeautifulSoup, Tag

from coinrag_integrations.evaluation.errors.classes import ERRORS
from coinrag_integrations.evaluation.errors.judged import judge
from coinrag_integrations.evaluation.errors.page import parts_of, render_page
from tests.browser import needs_browser, opened
from tests.evaluation.errors.passages import GOLD, chunk, evidence, measured, write

LOADED = chunk("[[Bastien Roule built it.]] Or [[Ida Merle]] did. [It plays.]", 2)
UNFOUND = chunk("Bastien Roule [was born here.]", None, document_id="b", is_supporting=True)
ODD = 'quiet & "odd"=1'
HOSTILE = (
    "</script></style><script>document.title='gone'</script><img src=x onerror=alert(1)>'\"&amp;"
)


def answers(n: str, data: str, *said: str) -> list[dict]:
    return [
        measured(answer, example=n, data=data, method=method, f1=0.25)
        for method, answer in zip(("full", "spans"), said, strict=True)
    ]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three questions of two data sets: spans is distracted, right, right; full right, empty, right."""
    write(
        tmp_path,
        [
            evidence(LOADED, UNFOUND, chunk("[[Nobody.]]", 1)),
            evidence(LOADED, example="2", question="Who? <b>"),
            evidence(LOADED, data=ODD, example="3"),
        ],
        [
            *answers("1", "x", GOLD, "Ida Merle"),
            *answers("2", "x", "", GOLD),
            *answers("3", ODD, GOLD, GOLD),
        ],
    )
    return tmp_path


def page_of(folder: Path) -> Path:
    path = folder / "errors.html"
    path.write_text(render_page(judge(folder)), encoding="utf-8")
    return path


def soup_of(folder: Path) -> BeautifulSoup:
    return BeautifulSoup(page_of(folder).read_text(), "html.parser")


def words(tag: Tag) -> str:
    return " ".join(tag.get_text().split())


def test_counts_lead_to_the_answers(folder):
    soup = soup_of(folder)
    assert [words(it) for it in soup.find_all("h2")] == ["x", ODD]
    table = soup.find("table")
    assert [words(it) for it in table.thead.find_all("th")] == ["class", "spans", "full"]
    rows = {
        words(row.th): [words(td) for td in row.find_all("td")]
        for row in table.tbody.find_all("tr")
    }
    assert list(rows) == [error.replace("_", " ") for error in ERRORS]
    assert (rows["right"], rows["distracted"], rows["empty"]) == (
        ["1", "1"],
        ["1", "0"],
        ["0", "1"],
    )
    links = [a["href"] for a in table.find_all("a")]
    assert "#data=x&method=spans&class=distracted" in links
    assert [words(it) for it in soup.find_all("dd")] == list(ERRORS.values())


def test_a_question_shows_all_there_is_to_see(folder):
    first, second, _ = soup_of(folder).find_all("details", class_="question")
    assert words(first.find_all("p")[1]) == f"Gold: {GOLD}"
    spans, full = first.find_all("li", class_="answer")
    assert "Ida Merle" in words(spans)
    assert "F1 0.25, NLL 1.25, distracted: said in 1 other nugget, gold in 1 nugget" in words(spans)
    assert full["data-class"] == "right"
    chunks = [words(it.find("p")) for it in first.find_all("section")]
    assert chunks[0].startswith("1. a 1 of 1 nuggets loaded")
    assert chunks[1].startswith("2. a 2 of 3 nuggets loaded gold answer")
    assert chunks[2] == "not found b 0 of 1 nuggets loaded supporting gold answer"
    rest = first.find("details", class_="rest")
    assert words(rest.summary) == "1 not found, 1 supporting, 1 with a gold answer"
    assert not rest.has_attr("open")
    assert not second.find("details")
    assert "empty" in words(second.summary)


def test_passages_are_marked_in_words_too(folder):
    first = soup_of(folder).find("details", class_="question")
    text = first.find_all("section")[1].find("p", class_="text")
    assert text.get_text() == LOADED.text
    assert [(it.name, it.get_text(), it["class"], it["title"]) for it in text.find_all(True)] == [
        (
            "mark",
            GOLD,
            ["loaded", "holds", "first"],
            "nugget 1, loaded; holds a gold answer; gold answer",
        ),
        ("span", " built it.", ["loaded", "holds"], "nugget 1, loaded; holds a gold answer"),
        (
            "span",
            "Ida Merle",
            ["loaded", "said", "first"],
            "nugget 2, loaded; holds what was said by spans",
        ),
        ("span", "It plays.", ["left", "first"], "nugget, left"),
    ]
    unfound = first.find_all("section")[2].find("mark")
    assert unfound["title"] == "gold answer, in no nugget"


def test_the_parts_of_a_text_are_all_of_it():
    overlapping = chunk("[[One two]] three")
    more = overlapping.nuggets[0]._replace(start=4, stop=13, is_loaded=False, rank=None)
    both = replace(overlapping, nuggets=(*overlapping.nuggets, more))
    it = parts_of(both, [(2, 5)], {})
    assert [part.text for part in it] == ["On", "e ", "t", "wo", " three"]
    assert [part.style for part in it] == [
        *("loaded holds first", "loaded holds", "loaded holds", "loaded holds", "left")
    ]


def test_nothing_of_what_is_shown_is_markup(tmp_path):
    write(
        tmp_path,
        [
            evidence(
                chunk(f"[[{HOSTILE}]] and [{HOSTILE}]", document_id=HOSTILE),
                data=HOSTILE,
                question=HOSTILE,
                answers=(HOSTILE, "gold"),
            )
        ],
        [measured(HOSTILE, data=HOSTILE), measured("x", data=HOSTILE, method="full")],
    )
    page = page_of(tmp_path).read_text()
    assert page.count("<script>") == page.count("</script>") == 1
    assert "<img" not in page
    soup = BeautifulSoup(page, "html.parser")
    question = soup.find("details", class_="question")
    assert question["data-data"] == HOSTILE
    assert HOSTILE in question.summary.get_text()
    assert question.find("q").get_text() == HOSTILE
    assert HOSTILE in question.find("p", class_="text").get_text()
    assert not soup.find_all(["img", "link", "iframe"])
    assert not [tag for tag in soup.find_all(True) if any(name[:2] == "on" for name in tag.attrs)]
    assert not soup.find_all(src=True)


def test_it_says_what_is_left_out(folder):
    rows = [measured("a", settings="t"), *answers("2", "x", "", ""), measured("a")]
    write(folder / "b", [evidence(LOADED)], rows)
    text = words(soup_of(folder / "b").find("p"))
    assert text.endswith(
        "Results of 1 other settings are left out. 1 questions without evidence are left out."
    )


def visible(soup: BeautifulSoup) -> list[int]:
    questions = soup.find_all("details", class_="question")
    return [i for i, it in enumerate(questions, 1) if not it.has_attr("hidden")]


@needs_browser
@pytest.mark.parametrize(
    ("fragment", "shown"),
    [
        ("", [1, 2, 3]),
        ("data=x", [1, 2]),
        ("class=distracted", [1]),
        ("method=full&class=right", [1, 3]),
        ("data=x&method=spans&class=right", [2]),
        ("data=quiet+%26+%22odd%22%3D1&class=right", [3]),
        ("class=misread", []),
        ("data=nowhere", []),
    ],
)
def test_the_address_is_a_filter(folder, tmp_path, fragment, shown):
    soup = opened(page_of(folder), fragment, tmp_path / "profile")
    assert visible(soup) == shown
    assert words(soup.find(id="shown")) == f"{len(shown)} of 3 questions"
    assert not soup.find(id="filter").has_attr("hidden")
    marked = [it["data-method"] for it in soup.select(".answer.match")]
    assert bool(marked) == (bool(shown) and ("class" in fragment))


@needs_browser
def test_the_form_is_a_filter_and_writes_the_address(folder, tmp_path):
    """A script of the test's own chooses; for that it takes the page's policy away."""
    page = page_of(folder)
    policy = str(BeautifulSoup(page.read_text(), "html.parser").find("meta", {"http-equiv": True}))
    choose = (
        "<script>const it = document.querySelector('[name=data]'); it.value = 'quiet & \"odd\"=1';"
        "it.dispatchEvent(new Event('change', {bubbles: true})); document.title = location.hash;"
        "document.querySelector('td a').click();</script>"
    )
    html = page.read_text().replace("</body>", f"{choose}</body>")
    assert html != page.read_text()
    page.write_text(html)
    soup = opened(page, "", tmp_path / "a")
    assert visible(soup) == [1, 2, 3], "the policy allows no script but the page's own"
    start = html.index("<meta http-equiv")
    page.write_text(html[:start] + html[html.index(">", start) + 1 :])
    assert "default-src" in policy
    soup = opened(page, "", tmp_path / "b")
    assert words(soup.title) == "#data=quiet+%26+%22odd%22%3D1"
    assert visible(soup) == [2], "a count leads to what was counted: spans right in x"


@needs_browser
def test_a_hostile_page_does_nothing(tmp_path):
    write(
        tmp_path,
        [evidence(chunk(f"[[{HOSTILE}]]"), question=HOSTILE, answers=(HOSTILE,))],
        [measured(HOSTILE)],
    )
    soup = opened(page_of(tmp_path), "data=x", tmp_path / "profile")
    assert words(soup.title) == "Errors: x"
    assert visible(soup) == [1]
