# SPDX-License-Identifier: Apache-2.0
"""The pages of a rank: how many fit, the cache that holds them, the sequences of its requests.

Knows configurations of vLLM, but neither passes nor tensors. Invariant: vLLM has as many blocks as
there are pages, so what its scheduler admits has room.
"""
import time
from typing import Any, List, Optional

import torch
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.model_executor.models.utils import extract_layer_index
from vllm.platforms import current_platform

from .. import __version__
from .._cache import Cache
from .._errors import Invalid, OutOfMemory
from .._runtime import Runtime
from ..capi import Select, Stats
from . import options as _options
from .metrics import Written, values_of
from .refusals import refuse
from .requests import Requests, log

MIB = 1 << 20


class Pool:
    """One per engine and process.

    layers  our attention layers of this rank by name, in the order of the model
    """

    def __init__(self, config: Any, layers: dict) -> None:
        self.options = _options.of_config(config)
        self.runtime = _runtime(self.options)
        self.layers = layers
        self._config = config
        self._shape = self._settings()
        self.block_tokens: int = config.cache_config.block_size
        self.bytes_per_block: int = Cache.plan_for(
            self.runtime, **dict(self._shape, sequences_max=1, host_tokens_max=self.block_tokens,
                                 disk_path=None)
        ).host_kv_bytes
        self.cache: Optional[Cache] = None
        self.requests: Optional[Requests] = None
        parallel = config.parallel_config
        self._counters = Written(engine=str(parallel.data_parallel_index), rank=str(parallel.rank))
        self._told, self._before = time.monotonic(), Stats()

    def _settings(self) -> dict:
        """Of the cache, without memory."""
        config, impl = self._config, next(iter(self.layers.values()))
        shapes = {(i.num_heads, i.num_kv_heads, i.head_size, i.scale) for i in self.layers.values()}
        if len(shapes) > 1:
            refuse("layers of different shapes", "take another model")
        flight = config.max_concurrent_batches
        settings = dict(
            self.options.cache, layers=len(self.layers), query_heads=impl.num_heads,
            kv_heads=impl.num_kv_heads, head_dim=impl.head_size, dtype=config.model_config.dtype,
            softmax_scale=impl.scale, tokens_max=config.model_config.max_model_len,
            sequences_max=config.scheduler_config.max_num_seqs * flight)
        if self.options.head_mask is not None:
            if config.speculative_config is not None:
                refuse("drafts with a head mask", "streaming heads take nothing back; leave one out")
            settings["head_mask"] = self._mask(self.options.head_mask, impl.num_kv_heads)
        return settings

    def _mask(self, path: str, heads: int) -> List[list]:
        """The rows and columns of this rank."""
        model = self._config.model_config
        total = model.get_total_num_kv_heads()
        rows = _options.read_mask(path, model.get_total_num_hidden_layers(), total)
        ranks = self._config.parallel_config.tensor_parallel_size
        first = get_tensor_model_parallel_rank() * total // ranks
        return [rows[extract_layer_index(name)][first:first + heads] for name in self.layers]

    # -- how many blocks --

    def size_blocks(self, bytes_of_vllm: int) -> None:
        """Tell vLLM how many blocks there are, each with `bytes_of_vllm` bytes of its own tensors."""
        if self.options.disk_bytes is not None:
            room = self.options.disk_bytes
        else:
            room = self._host_memory()
        blocks = room // self.bytes_per_block
        if blocks < 1:
            raise OutOfMemory("host_memory = %d: a block of %d tokens takes %d bytes of pages; give more"
                              % (room, self.block_tokens, self.bytes_per_block))
        self._config.cache_config.kv_cache_memory_bytes = (blocks + 1) * bytes_of_vllm # one is nobody's

    def _host_memory(self) -> int:
        parallel = self._config.parallel_config
        return self.options.host_memory or _options.default_memory(parallel.world_size,
                                                                   parallel.data_parallel_index)

    def open(self) -> None:
        """Reserve all memory, when vLLM has settled on a number of blocks."""
        blocks = self._config.cache_config.num_gpu_blocks - 1
        tokens = blocks * self.block_tokens
        need, settings = blocks * self.bytes_per_block, dict(self._shape, host_tokens_max=tokens)
        limit, disk = self.options.host_memory, self.options.disk_bytes
        if disk is not None:
            settings.update(disk_bytes=disk, host_bytes=self._host_memory())
            limit = disk
        if limit is not None and need > limit:
            raise OutOfMemory("num_gpu_blocks_override = %d: pages of %d blocks take %d bytes, and "
                              "there are %d; lower it, or give more host_memory" % (
                                  blocks + 1, blocks, need, limit))
        self.cache = Cache(self.runtime, **settings)
        if self.block_tokens % self.cache.settings.page_size:
            raise Invalid("block_size = %d: must be a multiple of page_size = %d" % (
                self.block_tokens, self.cache.settings.page_size))
        self.requests = Requests(self.cache, settings["sequences_max"],
                                 self._config.max_concurrent_batches)
        log.info("%s", self.describe())
        if self._config.cache_config.enable_prefix_caching:
            log.info("kvferry: prefix caching finds nothing, because requests share no pages")

    def describe(self) -> str:
        """What is in force, in a line."""
        cache = self.cache
        assert cache is not None
        s, plan = cache.settings, cache.plan
        device = plan.device_kv_bytes + plan.device_digest_bytes + plan.device_table_bytes
        host = plan.host_kv_bytes + plan.host_staging_bytes + plan.host_table_bytes
        blocks = self._config.cache_config.num_gpu_blocks - 1
        return ("kvferry %s on %s: budget %d, pages of %d tokens, select %s%s; %d blocks of %d, %d tokens "
                "fit, in %d requests at once of up to %d; host memory %d MiB%s, device memory %d MiB" % (
                    __version__, self.runtime.device_name, s.budget_tokens, s.page_size,
                    Select(s.select).name.lower(),
                    ", head mask" if self.options.head_mask is not None else "", blocks,
                    self.block_tokens, blocks * self.block_tokens,
                    self._config.scheduler_config.max_num_seqs, s.tokens_max, host // MIB,
                    ", disk %d MiB" % (plan.disk_bytes // MIB) if plan.disk_bytes else "",
                    device // MIB))

    # -- while it serves --

    def tell(self) -> None:
        """After a pass: counters, and now and then a line, if there was something to do."""
        assert self.cache is not None and self.requests is not None
        stats, now = self.cache.stats(), time.monotonic()
        self._counters.write(values_of(stats, self.requests.lost))
        if not self.options.log_interval or now - self._told < self.options.log_interval:
            return
        self._told = now
        if stats.steps != self._before.steps:
            log.info("%s", self._line(stats))
        self._before = stats

    def _line(self, stats: Stats) -> str:
        """What it holds, and what it did since the last line."""
        cache, requests, before = self.cache, self.requests, self._before
        assert cache is not None and requests is not None

        def since(name: str) -> float:
            return getattr(stats, name) - getattr(before, name)

        selected = since("hits") + since("misses")
        recall = ", recall %.3f" % (since("recall_sum") / since("verified")) if since("verified") else ""
        return ("kvferry: %d sequences with %d tokens; %.0f tokens attended per KV head and step, "
                "%.1f%% of pages were on the device, %d MiB fetched%s" % (
                    len(requests), requests.tokens(),
                    since("tokens_attended") / since("steps") / cache.settings.kv_heads,
                    100.0 * since("hits") / selected if selected else 100.0,
                    since("bytes_to_device") // MIB, recall))

    def close(self) -> None:
        """Give all memory back."""
        self.runtime.close()


def _runtime(options: _options.Options) -> Runtime:
    def line(level: int, text: str) -> None:
        log.info("kvferry: %s", text)
    if current_platform.is_cpu():
        return Runtime(device="host", log=line, **options.runtime)
    return Runtime(device="cuda", device_ordinal=torch.cuda.current_device(), log=line,
                   **options.runtime)
