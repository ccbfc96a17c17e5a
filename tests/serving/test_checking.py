"""A request gets what its own tokens stand for, or nothing."""

from __future__ import annotations

import pytest

from coinrag_integrations.engine import Engine, EngineConfig, Text
from coinrag_integrations.errors import ConfigError
from coinrag_integrations.serving.checking import check, entry_tokens
from coinrag_integrations.serving.request import PrefixRequest
from coinrag_integrations.serving.salt import salt_of
from coinrag_integrations.serving.writing import PrefixWriter
from coinrag_integrations.types import Scope, Span, SpanRef
from tests.serving.conftest import SENTENCES
from tests.tiny import fill


def spans(served):
    first, second = served.chunks[:2]
    return first.ref(Span(3, 9)), second.ref()


def test_what_the_writer_writes_is_believed(served):
    refs = spans(served)
    found = check(served.incoming(*refs), served.texts)
    head = served.engine.prompt.head
    assert (found.head, found.refs, found.scope) == (head, refs, Scope())
    assert found.n_entries == len(head) + 6 + len(served.chunks[1])
    assert found.n_entries == served.written(*refs).n_entries


@pytest.mark.parametrize("params", [None, {}])
def test_a_request_without_handles_is_none_of_ours(served, params):
    assert check(served.incoming(params=params, salt=None), served.texts) is None
    assert check(served.incoming(params=params, salt="somebody's"), served.texts) is None


def test_a_salt_of_ours_without_handles_is_refused(served):
    with pytest.raises(ConfigError, match="no handles came"):
        check(served.incoming(*spans(served), params=None), served.texts)


@pytest.mark.parametrize("salt", [None, "", "coinrag-0", "mine"])
def test_another_salt_is_refused(served, salt):
    with pytest.raises(ConfigError, match="cache_salt"):
        check(served.incoming(*spans(served), salt=salt), served.texts)


def test_the_salt_of_another_order_is_refused(served):
    a, b = spans(served)
    other = served.written(b, a).salt
    with pytest.raises(ConfigError, match="cache_salt"):
        check(served.incoming(a, b, salt=other), served.texts)


def test_other_tokens_are_refused_wherever_they_stand(served):
    request = served.incoming(*spans(served))
    n = check(request, served.texts).n_entries
    for at in range(n):
        prompt = list(request.prompt)
        prompt[at] = (prompt[at] + 1) % 256
        with pytest.raises(ConfigError, match=r"no head|not believed"):
            check(served.incoming(*spans(served), prompt=prompt), served.texts)


@pytest.mark.parametrize("n", [0, 1, 20, 40])
def test_a_prompt_that_ends_too_early_is_refused(served, n):
    request = served.incoming(*spans(served))
    total = check(request, served.texts).n_entries
    with pytest.raises(ConfigError, match=r"n_head|not believed|nothing stands behind"):
        check(served.incoming(*spans(served), prompt=request.prompt[: min(n, total)]), served.texts)
    with pytest.raises(ConfigError, match="nothing stands behind"):
        check(served.incoming(*spans(served), prompt=request.prompt[:total]), served.texts)


def test_what_a_server_would_compute_anew_is_refused(served):
    with pytest.raises(ConfigError, match="cannot go with prompt_logprobs"):
        check(served.incoming(*spans(served), odd="prompt_logprobs"), served.texts)
    assert check(served.incoming(params=None, salt=None, odd="pooling"), served.texts) is None


def test_a_prompt_of_embeddings_is_refused(served):
    with pytest.raises(ConfigError, match="token ids"):
        check(served.incoming(*spans(served), prompt=None), served.texts)


def test_a_head_that_was_not_prepared_is_refused(served):
    ref = spans(served)[0]
    name = served.engine.handles.name(ref)
    asked = PrefixRequest(scope=Scope(), n_head=3, handles=(name,))
    tokens = served.chunks[0].token_ids[ref.start : ref.stop]
    request = served.incoming(params=asked.to_params(), prompt=(5, 6, 7, *tokens, 8))
    with pytest.raises(ConfigError, match="no head that was prepared"):
        check(request, served.texts)


def test_an_empty_prefix_is_refused(served):
    asked = PrefixRequest(scope=Scope(), n_head=0, handles=())
    with pytest.raises(ConfigError, match="prefix is empty"):
        check(served.incoming(params=asked.to_params(), prompt=(1, 2)), served.texts)


def test_documents_that_are_gone_are_refused(served):
    request = served.incoming(*spans(served))
    served.engine.catalog.delete_document("doc")
    with pytest.raises(ConfigError, match="its document is gone"):
        check(request, served.texts)


def test_handles_of_another_tenant_are_refused(served, model, tmp_path):
    config = EngineConfig(chunk_tokens=32, coverage="all")
    scope = Scope(tenant="other")
    with Engine(model, tmp_path / "store", config, scope=scope) as engine:
        chunk = fill(engine, SENTENCES)[0]
        written = PrefixWriter.of(engine).write(
            [Text(engine.prompt.head), chunk.ref(), Text(engine.prompt.tail("Who?"))]
        )
        own = served.incoming(served.chunks[0].ref())
        assert written.prompt[: written.n_entries] == own.prompt[: written.n_entries]
        assert written.salt != own.salt
        for params in (written.params, {**written.params, "tenant": "default"}):
            with pytest.raises(ConfigError, match=r"not served here|not believed"):
                check(served.incoming(params=params, salt=written.salt), served.texts)


def test_slots_show_the_last_of_their_tokens(served):
    chunk = served.chunks[0]
    ids = chunk.token_ids
    assert entry_tokens(chunk, SpanRef(chunk.chunk_id, 4, 12, 4)) == (ids[7], ids[11])
    n = len(ids)
    assert entry_tokens(chunk, SpanRef(chunk.chunk_id, 0, n - 1, 16)) == (ids[15], ids[n - 2])
    assert entry_tokens(chunk, SpanRef(chunk.chunk_id, 1, 4)) == ids[1:4]


def test_slots_are_named_beside_entries(slotted):
    first, second = slotted.chunks[:2]
    refs = (SpanRef(first.chunk_id, 0, len(first), 4), second.ref(Span(1, 5)))
    found = check(slotted.incoming(*refs), slotted.texts)
    assert found.refs == refs
    assert found.n_entries == len(slotted.engine.prompt.head) + 8 + 4
    written = slotted.written(*refs)
    assert len(written.text) - len(written.prompt) == len(first) - 8


def test_slots_of_a_store_that_has_none_are_written_as_text(served):
    ref = SpanRef(served.chunks[0].chunk_id, 0, 32, 4)
    assert served.written(ref).params is None


def test_the_salt_is_made_of_what_was_believed(served):
    refs = spans(served)
    expected = salt_of(
        key=served.engine.catalog.secret(),
        forms={1: served.engine.fingerprint.digest},
        scope=Scope(),
        head=served.engine.prompt.head,
        refs=refs,
    )
    assert served.written(*refs).salt == expected
