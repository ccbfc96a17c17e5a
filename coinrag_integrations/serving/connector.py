"""The KV connector that a vLLM server loads: its calls to `checking` and `loads`, and nothing else.

    --kv-transfer-config '{"kv_connector": "CoinRAGConnector", "kv_role": "kv_consumer",
        "kv_connector_module_path": "coinrag_integrations.serving.connector",
        "kv_connector_extra_config": {"store": "/data/store"}}'

An exception out of a connector ends the whole server. What may be wrong with the server's own options is
therefore found while it starts, and whatever is wrong with a request ends that request alone: it is made
to wait for a prefix that then fails to come.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
)
from vllm.model_executor.models.utils import extract_layer_index
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import hash_block_tokens
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from coinrag_integrations.errors import ConfigError
from coinrag_integrations.serving.blocks import block_names
from coinrag_integrations.serving.checking import Incoming, Injection, Texts, check
from coinrag_integrations.serving.config import ServingConfig
from coinrag_integrations.serving.loading import Loader, open_texts
from coinrag_integrations.serving.loads import Landed, Loads, Order
from coinrag_integrations.serving.metrics import CoinRAGMetrics, CoinRAGStats
from coinrag_integrations.serving.paged import Share, check_layout, heads_of
from coinrag_integrations.serving.prepared import Prepared
from coinrag_integrations.serving.salt import MARK, salt_of

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.kv_cache_utils import BlockHash
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)

# What is known of a request: its prefix, none, or why it must fail.
Verdict = Injection | None | str


@dataclass
class Orders(KVConnectorMetadata):
    """What the scheduler has the workers load in a step."""

    orders: list[Order] = field(default_factory=list)


class CoinRAGConnector(KVConnectorBase_V1):
    """Puts composed prefixes into the blocks of requests that name them by handles."""

    _cache_hit_source = CacheHitSource.DISK

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        """Open the store, and refuse a server that cannot serve it.

        Raises:
            ConfigError: options that do not go together, or another model than the store's.
            StoreError: nothing was prepared in the store, or it cannot be read.
        """
        super().__init__(vllm_config, role, kv_cache_config)
        self._config = ServingConfig.parse(self._kv_transfer_config.kv_connector_extra_config)
        _check_server(vllm_config, kv_cache_config)
        for scope in self._config.scopes:
            layout = Prepared.open(self._config.store, scope, self._config.fingerprint).layout
            model = vllm_config.model_config
            check_layout(
                layout,
                n_layers=model.get_total_num_hidden_layers(),
                n_kv_heads=model.get_total_num_kv_heads(),
                head_dim=model.get_head_size(),
                dtype=model.dtype,
            )
        # Of the scheduler's process:
        self._texts: dict[Any, Texts] = {}
        self._closing: list[Callable[[], None]] = []
        self._verdicts: dict[str, Verdict] = {}
        self._orders: list[Order] = []
        if role is KVConnectorRole.SCHEDULER:
            for scope in self._config.scopes:
                self._texts[scope], close = open_texts(self._config, scope)
                self._closing.append(close)
        # Of a worker's:
        self._loads: Loads | None = None
        self._stats = CoinRAGStats()

    # -- the scheduler asks ----------------------------------------------------------------------

    def on_new_request(self, request: Request) -> None:
        """Judge a request once. One that must fail is made to ask for its prefix."""
        if not isinstance(request.kv_transfer_params, dict | None):
            self._verdicts[request.request_id] = "kv_transfer_params is no object"
            request.kv_transfer_params = {}  # the scheduler calls methods of it
        verdict = self._verdict(request)
        if isinstance(verdict, Injection):
            verdict = self._verdicts[request.request_id] = self._name_blocks(request, verdict)
        if isinstance(verdict, str):
            request.skip_reading_prefix_cache = False  # else it would not be asked, and answered

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """How many tokens come from us behind those that are there already."""
        verdict = self._verdict(request)
        if verdict is None:
            return 0, False
        n = request.num_tokens if isinstance(verdict, str) else verdict.n_entries
        n_new = max(0, n - num_computed_tokens)
        return n_new, n_new > 0

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """Note where the rows of a prefix belong."""
        verdict = self._verdict(request)
        if verdict is None or num_external_tokens == 0:
            return
        if isinstance(verdict, str):
            order = Order(request_id=request.request_id, injection=None)
        else:
            order = Order(
                request_id=request.request_id,
                injection=verdict,
                start=verdict.n_entries - num_external_tokens,
                blocks=tuple(blocks.get_block_ids()[0]),
            )
        self._orders.append(order)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """Hand over what was noted since the last step."""
        orders, self._orders = self._orders, []
        return Orders(orders)

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Tell the client how much of its prompt was not computed."""
        verdict = self._verdicts.pop(request.request_id, None)
        if not isinstance(verdict, Injection):
            return False, None
        return False, {"coinrag": {"n_entries": verdict.n_entries}}

    def _verdict(self, request: Request) -> Verdict:
        if request.request_id not in self._verdicts:
            self._verdicts[request.request_id] = self._judge(request)
        return self._verdicts[request.request_id]

    def _name_blocks(self, request: Request, found: Injection) -> Verdict:
        """Have blocks shared with other prefixes that begin alike, and with nothing else."""
        try:
            texts = self._texts[found.scope]
            beginning = salt_of(
                key=texts.handles.key,
                forms=texts.forms,
                scope=found.scope,
                head=found.head,
                refs=(),
            )
            cache = self._vllm_config.cache_config
            names = block_names(found, beginning, cache.block_size)
            if names is not None:  # else they are shared with the same prefix, by its salt
                hash_function = get_hash_fn_by_name(cache.prefix_caching_hash_algo)
                request._block_hasher = _hasher(names, hash_function, cache.block_size)
                request.block_hashes.clear()
                request.update_block_hashes()
        except Exception as error:
            logger.exception("request %s cannot be cached", request.request_id)
            return str(error) or type(error).__name__
        return found

    def _judge(self, request: Request) -> Verdict:
        try:
            return check(
                Incoming(
                    params=request.kv_transfer_params,
                    prompt=request.prompt_token_ids,
                    salt=request.cache_salt,
                    odd=_odd(request),
                ),
                self._texts,
            )
        except Exception as error:  # noqa: BLE001 - an exception here would end the whole server
            logger.warning("request %s is refused: %s", request.request_id, error)
            return str(error) or type(error).__name__

    # -- a worker is told ------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Open the KV of all scopes, for the device that the caches are on."""
        device = next(iter(kv_caches.values())).device
        layers = self._vllm_config.compilation_config.static_forward_context
        rank, size = get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()
        n_heads = self._vllm_config.model_config.get_total_num_kv_heads()
        share = Share(
            layers={extract_layer_index(name): layers[name] for name in kv_caches},
            heads=heads_of(n_heads, rank, size),
        )
        self._loads = Loads(
            loaders={it: Loader.open(self._config, it, device) for it in self._config.scopes},
            block_size=self._vllm_config.cache_config.block_size,
            n_threads=self._config.n_threads,
            share=share,
        )

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Begin to load what the scheduler wants."""
        metadata = self._get_connector_metadata()
        if self._loads is not None and isinstance(metadata, Orders):
            self._loads.start(metadata.orders)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Write what has been loaded into its blocks, and say which requests may go on or must fail."""
        landed: list[Landed] = [] if self._loads is None else self._loads.step()
        for it in landed:
            self._stats.note(it)
        return KVConnectorTransferResults(
            finished_recving={it.request_id for it in landed},
            failed_recving={it.request_id for it in landed if it.error},
        )

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """See `get_transfer_results`, which is what says that a load has failed."""
        return None, self.get_transfer_results(finished_req_ids).finished_recving

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to wait for: a request runs once all of its prefix is there."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Nothing is saved."""

    def wait_for_save(self) -> None:
        """Nothing is saved."""

    # -- metrics and life ------------------------------------------------------------------------

    def get_kv_connector_stats(self) -> CoinRAGStats | None:
        """What happened since the last call."""
        if self._stats.is_empty():
            return None
        stats, self._stats = self._stats, CoinRAGStats()
        return stats

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> CoinRAGStats:
        """Stats out of what another process sent."""
        return CoinRAGStats(data) if data else CoinRAGStats()

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> CoinRAGMetrics:
        """Our counters in the server's /metrics."""
        return CoinRAGMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        """Close what was opened."""
        if self._loads is not None:
            self._loads.close()
            self._loads = None
        while self._closing:
            self._closing.pop()()


def _hasher(
    names: Sequence[str], hash_function: Callable[[Any], bytes], size: int
) -> Callable[[Request], list[BlockHash]]:
    """Makes the hashes of a request's full blocks as vLLM does, with names in all of them and no salt."""

    def hash_blocks(request: Request) -> list[BlockHash]:
        made: list[BlockHash] = []
        known = len(request.block_hashes)
        parent = request.block_hashes[-1] if known else None
        for block in range(known, request.num_tokens // size):
            tokens = request.all_token_ids[block * size : (block + 1) * size]
            named = ((MARK, names[block]),) if block < len(names) else None
            parent = hash_block_tokens(hash_function, parent, tokens, named)
            made.append(parent)
        return made

    return hash_blocks


def _check_server(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
    """Refuse servers whose cache is not one row a token, in order, for all heads and layers.

    Raises:
        ConfigError: names what does not go.
    """
    transfer, parallel = vllm_config.kv_transfer_config, vllm_config.parallel_config
    groups = kv_cache_config.kv_cache_groups
    spec = groups[0].kv_cache_spec if groups else None
    wrong = {
        "kv_role is not 'kv_consumer'": transfer.kv_role != "kv_consumer",
        "kv_load_failure_policy is not 'fail'": transfer.kv_load_failure_policy != "fail",
        "the model has a compressed cache (MLA)": vllm_config.model_config.use_mla,
        "the model's layers have different caches, or windows": len(groups) != 1
        or getattr(spec, "sliding_window", None) is not None
        or getattr(spec, "attention_chunk_size", None) is not None,
        "speculative decoding is on": vllm_config.speculative_config is not None,
        "decode context parallelism is on": parallel.decode_context_parallel_size != 1,
    }
    if said := [reason for reason, it_is in wrong.items() if it_is]:
        raise ConfigError(f"composed prefixes cannot be served: {'; '.join(said)}")


def _odd(request: Request) -> str:
    """What of a request would make the server compute its prefix, or read it with another model."""
    sampling = request.sampling_params
    if sampling is None:
        return "pooling"
    if sampling.prompt_logprobs is not None:
        return "prompt_logprobs"
    if request.skip_reading_prefix_cache:
        return "skip_reading_prefix_cache"
    if request.lora_request is not None:
        return "a LoRA adapter"
    if request.mm_features or request.prompt_embeds is not None:
        return "images, sounds or embeddings"
    return "a streamed prompt" if request.resumable else ""
