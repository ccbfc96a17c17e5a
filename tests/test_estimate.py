"""What a store is estimated to cost, against the store that is then built."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from coinrag_integrations.cli.plan import plan
from coinrag_integrations.demo.data import demo_documents, demo_questions
from coinrag_integrations.engine import (
    Engine,
    EngineConfig,
    GenerationConfig,
    LoadedModel,
    load_model,
)
from coinrag_integrations.errors import (
    BudgetError,
    ConfigError,
    DocumentError,
    ModelError,
    StoreError,
)
from coinrag_integrations.evaluation.estimate import (
    Costs,
    Estimate,
    Growth,
    Guess,
    estimate,
    extrapolate,
)
from coinrag_integrations.evaluation.survey import (
    Survey,
    TokenisedText,
    draw_questions,
    survey,
)
from coinrag_integrations.evaluation.trial import estimate_store
from coinrag_integrations.nuggets import RuleProposer
from coinrag_integrations.rag import CoinRAG
from coinrag_integrations.retrieval import RetrievalConfig
from coinrag_integrations.types import Chunk, Document, Span
from tests.tiny import HashEmbedder, save_tiny

DOCUMENTS = demo_documents()[:16]
QUESTIONS = [item.question for item in demo_questions()[:24]]
ONE_TOKEN = GenerationConfig(max_new_tokens=1)
CODECS = ("none", "int8", "int4")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_model(save_tiny(tmp_path_factory.mktemp("model")))


@dataclasses.dataclass
class Built:
    """A store that was really built, and what asking it read."""

    report: object
    kv_bytes: int
    catalog_bytes: int
    index_bytes: int
    read: float


def build(
    model: LoadedModel,
    folder: Path,
    config: EngineConfig,
    documents: Sequence[Document] = DOCUMENTS,
) -> Built:
    # A tiny model encodes faster than a busy disk reads: by default such chunks would not be read.
    config = dataclasses.replace(config, load="read")
    with CoinRAG.open(folder, model=model, embedder=HashEmbedder(), config=config) as rag:
        report = rag.add(documents)
        kv = [rag.engine.store.path(chunk_id).stat().st_size for chunk_id in rag.engine.store]
        read = [_bytes_read(rag, question) for question in QUESTIONS]
        catalog = rag.engine.catalog.path
    return Built(
        report=report,
        kv_bytes=sum(kv),
        catalog_bytes=catalog.stat().st_size,
        index_bytes=sum(p.stat().st_size for p in (folder / "chroma").rglob("*") if p.is_file()),
        read=float(np.mean(read)),
    )


def _bytes_read(rag: CoinRAG, question: str) -> int:
    reply = rag.ask(question, generation=ONE_TOKEN)
    return reply.answer.timings.bytes_read


def between(low: float, guess: Guess, high: float) -> bool:
    return low <= guess.value <= high and guess.low <= guess.value <= guess.high


# -- against a real build ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("coverage", "codec"), [("nuggets", "none"), ("nuggets", "int4"), ("all", "int8")]
)
def test_looking_at_everything_estimates_the_store_that_is_built(model, tmp_path, coverage, codec):
    config = EngineConfig(chunk_tokens=96, coverage=coverage, codec=codec)
    told: list[str] = []
    guessed = estimate_store(
        DOCUMENTS, model, HashEmbedder(), config, n_sample=None, on_step=told.append
    )
    built = build(model, tmp_path, config)
    counted = {
        "n_chunks": guessed.chunks,
        "n_tokens": guessed.tokens,
        "n_nuggets": guessed.nuggets,
        "n_covered_tokens": guessed.covered_tokens,
    }
    for name, guess in counted.items():
        assert guess == Guess.exact(getattr(built.report, name)), name
    assert guessed.codec == codec
    assert guessed.kv_bytes[codec].value == pytest.approx(built.kv_bytes, rel=0.01)
    assert guessed.question_bytes[codec].value == pytest.approx(built.read, rel=0.25)
    assert between(built.catalog_bytes / 2, guessed.catalog_bytes, built.catalog_bytes * 2)
    assert between(built.index_bytes / 2, guessed.index_bytes, built.index_bytes * 2)
    assert len(told) >= 4


def test_a_sample_estimates_the_store_that_is_built(model, tmp_path):
    config = EngineConfig(chunk_tokens=96)
    guessed = estimate_store(DOCUMENTS, model, HashEmbedder(), config, n_sample=40)
    built = build(model, tmp_path, config)
    assert guessed.chunks == Guess.exact(built.report.n_chunks)  # all is tokenised
    assert guessed.tokens == Guess.exact(built.report.n_tokens)
    assert built.report.n_chunks > 3 * 40
    assert not guessed.nuggets.is_exact
    assert guessed.nuggets.value == pytest.approx(built.report.n_nuggets, rel=0.15)
    assert guessed.kv_bytes["none"].value == pytest.approx(built.kv_bytes, rel=0.15)
    assert guessed.question_bytes["none"].value == pytest.approx(built.read, rel=0.25)
    assert between(built.catalog_bytes / 2, guessed.catalog_bytes, built.catalog_bytes * 2)
    assert between(built.index_bytes / 2, guessed.index_bytes, built.index_bytes * 2)


def test_the_codecs_not_chosen_are_estimated_too(model, tmp_path):
    documents = DOCUMENTS[:4]
    config = EngineConfig(chunk_tokens=256, coverage="all")
    guessed = estimate_store(documents, model, HashEmbedder(), config, n_sample=None)
    for codec in CODECS:
        other = dataclasses.replace(config, codec=codec)
        built = build(model, tmp_path / codec, other, documents)
        assert guessed.kv_bytes[codec].value == pytest.approx(built.kv_bytes, rel=0.03), codec
        assert guessed.question_bytes[codec].value == pytest.approx(built.read, rel=0.25), codec


@pytest.mark.parametrize("codec", ["none", "int8"])
def test_slots_are_estimated_as_they_are_built(model, tmp_path, codec):
    config = EngineConfig(chunk_tokens=96, coverage="all", codec=codec, c2kv=(4, 8), load="read")
    guessed = estimate_store(DOCUMENTS, model, HashEmbedder(), config, n_sample=None)
    read = {(it.form, it.ratio): it for it in guessed.readings}
    options = {"model": model, "embedder": HashEmbedder(), "extractor": "untrained"}
    with CoinRAG.open(tmp_path, config=config, **options) as rag:
        rag.add(DOCUMENTS)
        stores = rag.engine.forms.stores
        kv = {k: sum(it.path(i).stat().st_size for i in it) for k, it in stores.items()}
        assert guessed.kv_bytes[codec].value == pytest.approx(kv[1], rel=0.01)
        for ratio in (4, 8):
            assert guessed.slot_bytes[ratio][codec].value == pytest.approx(kv[ratio], rel=0.01)
        for form, ratio in (("spans", None), ("c2kv", 4), ("c2kv", 8), ("hybrid", 8)):
            how = RetrievalConfig(form=form, ratio=ratio)
            replies = [rag.ask(it, retrieval=how, generation=ONE_TOKEN) for it in QUESTIONS]
            n_read = np.mean([reply.answer.timings.bytes_read for reply in replies])
            n_head = len(rag.engine.prompt.head)
            n_entries = np.mean([reply.answer.usage.cached - n_head for reply in replies])
            it = read[form, ratio]
            assert it.n_bytes[codec].value == pytest.approx(n_read, rel=0.25), form
            assert it.entries.value == pytest.approx(n_entries, rel=0.25), form
            assert it.encoded == Guess.exact(0)
    value = json.loads(json.dumps(guessed.to_dict(), allow_nan=False))
    assert value["slot_bytes"]["4"][codec]["value"] == guessed.slot_bytes[4][codec].value
    assert [it["form"] for it in value["readings"]][:3] == ["spans", "chunks", "c2kv"]


def test_a_trial_leaves_nothing_behind(model, tmp_path):
    estimate_store(DOCUMENTS[:2], model, HashEmbedder(), n_sample=4, scratch=tmp_path)
    assert not list(tmp_path.iterdir())


def test_what_was_measured_adds_up(model):
    guessed = estimate_store(DOCUMENTS[:4], model, HashEmbedder(), n_sample=8)
    assert set(guessed.build) == {"read", "nuggets", "encode", "catalog", "embed", "index"}
    assert all(
        part.value > 0 and part.low <= part.value <= part.high for part in guessed.build.values()
    )
    assert guessed.build_seconds.value == pytest.approx(
        sum(part.value for part in guessed.build.values())
    )
    weights = sum(p.numel() * p.element_size() for p in model.hf.parameters())
    assert guessed.ram_bytes.value > weights
    assert guessed.gpu_bytes is None
    assert guessed.full_ms.value > 0
    assert guessed.spans_ms.value > 0
    context = 5 * guessed.tokens.value / guessed.chunks.value
    assert 0.5 * context < guessed.context_tokens < 2 * context


def test_a_context_that_the_window_cannot_hold_is_cut_to_what_it_can(model):
    small = dataclasses.replace(model, window=600)
    guessed = estimate_store(
        DOCUMENTS[:4], small, HashEmbedder(), EngineConfig(chunk_tokens=256), n_sample=8
    )
    assert 0 < guessed.context_tokens < 600


def test_a_chunk_larger_than_the_window_is_refused(model):
    small = dataclasses.replace(model, window=100)
    with pytest.raises(BudgetError, match="smaller chunks"):
        estimate_store(DOCUMENTS[:2], small, HashEmbedder(), EngineConfig(chunk_tokens=256))


def test_a_scratch_folder_that_cannot_be_written_is_an_error_of_ours(model, tmp_path):
    with pytest.raises(StoreError, match="nowhere"):
        estimate_store(DOCUMENTS[:1], model, HashEmbedder(), scratch=tmp_path / "nowhere")


# -- counting ----------------------------------------------------------------------------------


@pytest.fixture
def engine(model: LoadedModel, tmp_path: Path) -> Iterator[Engine]:
    with Engine(model, tmp_path / "engine", EngineConfig(chunk_tokens=64)) as it:
        yield it


def look(engine: Engine, documents: Sequence[Document], **options: object) -> Survey:
    return survey(documents, engine.chunk, RuleProposer(), engine.covered, **options)


def test_of_a_large_corpus_some_documents_are_tokenised(engine):
    everything = look(engine, demo_documents())
    n_characters = sum(len(document.text) for document in demo_documents())
    some = look(engine, demo_documents(), max_characters=n_characters // 2)
    assert (some.n_documents, some.n_characters) == (len(demo_documents()), n_characters)
    held = sum(text.n_characters for text in some.texts)
    assert n_characters // 3 < held <= n_characters // 2
    pairs = tuple((t.n_characters, sum(t.chunk_tokens)) for t in some.texts)
    guess = extrapolate(pairs, Guess.exact(n_characters), some.n_documents)
    tokens = sum(sum(text.chunk_tokens) for text in everything.texts)
    assert guess.value == pytest.approx(tokens, rel=0.05)
    assert guess.low < guess.value < guess.high


def test_one_document_is_looked_at_however_large(engine):
    assert len(look(engine, DOCUMENTS, max_characters=10).texts) == 1


def test_a_sample_is_the_same_in_every_run_and_of_any_order(engine):
    first = look(engine, DOCUMENTS, n_sample=12)
    second = look(engine, DOCUMENTS[::-1], n_sample=12)
    assert [c.chunk_id for c in first.chunks] == [c.chunk_id for c in second.chunks]
    assert len(first.chunks) == len(first.covered) == 12
    assert len({chunk.document_id for chunk in first.chunks}) > 4
    for chunk, covered in zip(first.chunks, first.covered, strict=True):
        assert list(covered) == engine.covered(chunk)


def test_empty_documents_count_and_weigh_nothing(engine):
    void = Document(document_id="void", text="")
    found = look(engine, [*DOCUMENTS[:2], void])
    assert found.n_documents == len(found.texts) == 3
    assert (0, ()) in {(text.n_characters, text.chunk_tokens) for text in found.texts}


def test_documents_without_text_are_nothing_to_estimate_from(engine):
    with pytest.raises(DocumentError, match="nothing to estimate"):
        look(engine, [Document(document_id="void", text="")])
    with pytest.raises(DocumentError, match="nothing to estimate"):
        look(engine, [])


def test_questions_are_drawn_as_retrieval_finds_them(engine):
    chunks = look(engine, DOCUMENTS).chunks
    bare = dataclasses.replace(chunks[0], nuggets=())
    config = RetrievalConfig(n_chunks=3, n_nuggets=4)
    for found in draw_questions([bare, *chunks[1:]], config, 50):
        chunk_ids, refs = {chunk.chunk_id for chunk in found.chunks}, found.refs("spans")
        assert len(chunk_ids) == 3
        assert 1 <= len(refs) <= 4
        assert {ref.chunk_id for ref in refs} <= chunk_ids
        assert found.refs("chunks") == [chunk.ref() for chunk in found.chunks]
        assert [ref.ratio for ref in found.refs("hybrid", 4, n_raw=2)] == [1, 1, 4]
        around = found.refs("background", 4)
        assert {ref for ref in around if ref.ratio == 1} == set(refs)
        assert {ref.chunk_id for ref in around} == {ref.chunk_id for ref in refs}
    (found,) = draw_questions([bare], config, 1)
    assert found.refs("spans") == [bare.ref()]


# -- arithmetic --------------------------------------------------------------------------------


def test_all_units_are_a_count_and_some_have_a_range():
    pairs = ((2, 10), (4, 21), (6, 29))
    assert extrapolate(pairs, Guess.exact(12), 3) == Guess.exact(60)
    some = extrapolate(pairs, Guess.exact(120), 30)
    assert some.value == pytest.approx(600)
    assert some.low < 600 < some.high
    one = extrapolate(((2, 10),), Guess.exact(12), 6)
    assert (one.low, one.value, one.high) == pytest.approx((30, 60, 120))
    assert extrapolate((), Guess.exact(0)) == Guess.exact(0)
    vague = extrapolate(pairs, Guess(120, 60, 240), 30)
    assert vague.high - vague.low > 2 * (some.high - some.low)


def test_the_range_of_a_sample_mostly_holds_the_truth():
    random = Random(0)
    sizes = [random.randint(20, 512) for _ in range(400)]
    everything = [(x, x * random.gauss(0.8, 0.15)) for x in sizes]
    total, truth = Guess.exact(sum(sizes)), sum(y for _, y in everything)
    hits = 0
    for _ in range(300):
        guess = extrapolate(tuple(random.sample(everything, 40)), total, len(everything))
        hits += guess.low <= truth <= guess.high
    assert 0.9 * 300 <= hits < 300


def test_growth_passes_through_what_was_measured():
    growth = Growth(n=100, n_bytes=5_000, per_item=40)
    assert growth.at(Guess.exact(100)) == Guess.exact(5_000)
    assert growth.at(Guess.exact(200)).value == 9_000
    assert growth.at(Guess.exact(50)) == Guess.exact(2_500)


def by_hand(model: LoadedModel, *, full: float, spans: float) -> Estimate:
    """Two chunks of ten tokens, a nugget of four in each; 6 s of building."""
    chunks = tuple(
        Chunk(
            chunk_id=f"{i:032x}",
            document_id="d",
            index=i,
            text="x" * 10,
            char_start=0,
            token_ids=tuple(range(10)),
            offsets=tuple((j, j + 1) for j in range(10)),
        )
        for i in range(2)
    )
    counted = Survey(
        n_documents=1,
        n_characters=20,
        texts=(TokenisedText(n_characters=20, chunk_tokens=(10, 10)),),
        chunks=chunks,
        covered=((Span(0, 4),), (Span(2, 6),)),
        read_seconds=1.0,
        cut_seconds=0.5,
        nugget_seconds=0.5,
    )
    costs = Costs(
        encode=((10, 1.0), (10, 1.0)),
        headers={1: ((1, 100), (1, 100)), 4: ((1, 90), (1, 90))},
        embed_chunks=((1, 0.5), (1, 0.5)),
        embed_nuggets=(),
        put_index=((2, 0.5),) * 2,
        put_catalog=((1, 0.5),) * 2,
        catalog=Growth(n=20, n_bytes=1_000, per_item=10),
        index=Growth(n=2, n_bytes=2_000, per_item=100),
        vector_bytes=256,
        ram_bytes=10_000,
        gpu_bytes=None,
        full_ms=((1, full),) * 2,
        spans_ms=((1, spans),) * 2,
        context_tokens=20,
    )
    return estimate(counted, costs, model.layout, c2kv=(4,))


def test_an_estimate_by_hand(model):
    it = by_hand(model, full=30.0, spans=10.0)
    layers, heads, dim, itemsize = 3, 2, 16, model.layout.dtype.itemsize
    entries = 2 * layers * heads * dim * itemsize * 8
    assert it.kv_bytes["none"] == Guess.exact(entries + 8 * 8 + 200)
    codes = layers * 2 * heads * dim * 8 + 4 * layers * heads * 8  # 8-bit, and values' scales
    groups = 4 * layers * heads * dim * 2  # keys' scales, a group in each chunk
    assert it.kv_bytes["int8"] == Guess.exact(codes + groups + 16 * 8 + 8 * 2 + 200)
    half = codes - layers * heads * dim * 8
    assert it.kv_bytes["int4"] == Guess.exact(half + groups + 16 * 8 + 8 * 2 + 200)
    assert it.covered_share == Guess.exact(0.4)
    slots = entries // 8 * 6  # three in each chunk: the last one stands for two tokens
    assert it.slot_bytes[4]["none"] == Guess.exact(slots + 6 * 8 + 180)
    kv = it.kv_bytes["none"].value + it.slot_bytes[4]["none"].value
    assert it.disk_bytes.value == kv + 3_000
    assert it.build_seconds.value == pytest.approx(1 + 0.5 + 0.5 + 2 + 0.5 + 1 + 0.5)
    assert it.saved_ms.value == 20
    assert it.break_even_questions.value == pytest.approx(6_000 / 20)
    assert it.ram_bytes.value > 10_000 + 2 * 256
    day = it.per_day(150)
    assert day["break_even_days"] == pytest.approx(2)
    assert day["seconds_saved"] == pytest.approx(3)
    assert day["bytes_read"] == pytest.approx(150 * it.question_bytes["none"].value)
    assert it.per_day(0)["break_even_days"] is None


def test_forms_by_hand(model):
    """Without nuggets a chunk stands for itself; of ten tokens four are stored."""
    read = {it.form: it for it in by_hand(model, full=30.0, spans=10.0).readings}
    assert {form: it.ratio for form, it in read.items()} == {
        "spans": None,
        "chunks": None,
        **dict.fromkeys(("c2kv", "hybrid", "slots", "background"), 4),
    }
    entries = {form: it.entries.value for form, it in read.items()}
    assert entries["spans"] == entries["chunks"] == 20
    assert (entries["c2kv"], entries["hybrid"]) == (6, 13)
    encoded = {form: it.encoded.value for form, it in read.items()}
    assert (encoded["chunks"], encoded["c2kv"], encoded["hybrid"]) == (2, 0, 1)
    each = model.layout.bytes_per_entry
    n_bytes = {form: it.n_bytes["none"].value for form, it in read.items()}
    assert (n_bytes["chunks"], n_bytes["c2kv"], n_bytes["hybrid"]) == (0, 6 * each, 3 * each)


def test_what_is_no_faster_never_pays_off(model):
    it = by_hand(model, full=10.0, spans=30.0)
    assert it.break_even_questions is None
    assert it.per_day(100)["break_even_days"] is None
    assert it.to_dict()["break_even_questions"] is None


def test_a_range_without_end_is_none_in_json(model):
    it = by_hand(model, full=30.0, spans=10.0)
    it = dataclasses.replace(it, full_ms=Guess(30.0, 5.0, 60.0))
    assert it.break_even_questions.high == np.inf
    value = json.loads(json.dumps(it.to_dict(), allow_nan=False))
    assert value["break_even_questions"]["high"] is None
    assert value["break_even_questions"]["value"] == pytest.approx(300)
    assert value["kv_bytes"]["int8"]["value"] == it.kv_bytes["int8"].value


# -- the command -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def docs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("docs")
    for document in DOCUMENTS[:3]:
        (folder / f"{document.document_id.replace('/', '-')}.txt").write_text(document.text)
    return folder


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("folder"))


def run(*arguments: object):
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(plan)
    return CliRunner().invoke(app, [*map(str, arguments), "--json"])


def test_the_command_prints_tables_and_one_object(docs, tiny):
    options = ("--codec", "int8", "--c2kv", "4,8", "--questions-per-day", 1000)
    result = run(docs, "--model", tiny, *options)
    assert result.exit_code == 0, result.output
    (line,) = result.stdout.splitlines()
    value = json.loads(line)
    assert (value["n_documents"], value["codec"], value["failed"]) == (3, "int8", [])
    assert value["kv_bytes"]["int4"]["value"] < value["kv_bytes"]["int8"]["value"]
    assert value["per_day"]["questions"] == 1000
    assert value["settings"]["chunk_tokens"] == 512
    assert value["settings"]["c2kv"] == [4, 8]
    assert value["slot_bytes"].keys() == {"4", "8"}
    for words in (
        "slots of 8 tokens",
        "Forms of what is read",
        "background",
        "KV files (codec int8)",
        "memory while building",
        "read for a question",
    ):
        assert words in result.stderr


def test_the_command_names_unreadable_files_and_plans_for_the_rest(docs, tiny, tmp_path):
    (tmp_path / "binary.txt").write_bytes(b"\x00\x01\x02\xff" * 64)
    result = run(docs, tmp_path, "--model", tiny)
    assert result.exit_code == 1
    value = json.loads(result.stdout)
    assert value["n_documents"] == 3
    assert "binary.txt" in value["failed"][0]
    assert "binary.txt" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "kind", "words"),
    [
        (("{tmp}/nowhere", "--model", "{tiny}"), DocumentError, "nowhere"),
        (("{docs}", "--model", "{tmp}/x"), ModelError, "config.json"),
        (("{docs}", "--model", "{tmp}/broken"), ModelError, "cannot load the model"),
        (("{docs}", "--model", "{tiny}", "--codec", "int2"), ConfigError, "int8"),
        (("{docs}", "--model", "{tiny}", "--c2kv", "abc"), ConfigError, "as 4 or 4,8"),
        (("{docs}", "--model", "{tiny}", "--c2kv", "0"), ConfigError, "from 2 to 32"),
        (("{docs}", "--model", "{tiny}", "--coverage", "most"), ConfigError, "nuggets"),
        (("{docs}", "--model", "{tiny}", "--embedder", "word2vec"), ConfigError, "word2vec"),
        (("{docs}", "--model", "{tiny}", "--chunk-tokens", "4"), ConfigError, "too small"),
    ],
)
def test_bad_input_is_one_clear_error(docs, tiny, tmp_path, arguments, kind, words):
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text('{"model_type": "llama"}')
    result = run(*(a.format(tmp=tmp_path, docs=docs, tiny=tiny) for a in arguments))
    assert result.exit_code == 1
    assert type(result.exception) is kind
    assert words in str(result.exception)
