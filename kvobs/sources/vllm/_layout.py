"""Where vLLM keeps what is needed: tables of blocks, sizes, names. Reads attributes, changes nothing."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kvobs.model import Origin

SOURCE = "vllm"
_WHOLE = ("FullAttention", "MLA")


def origin_of(scheduler: Any) -> Origin:
    """Whose events these are."""
    config = scheduler.vllm_config
    named = config.model_config.served_model_name or config.model_config.model
    dtype = scheduler.cache_config.cache_dtype
    if dtype == "auto":
        dtype = str(config.model_config.dtype).removeprefix("torch.")
    pool = type(scheduler.kv_cache_manager.block_pool).__name__
    return Origin(SOURCE, str(named[0] if isinstance(named, list) else named), pool,
                  str(config.device_config.device_type), str(dtype))


def block_bytes_of(config: Any) -> int:
    """Bytes of one block on one rank, by vLLM's own configuration: a block belongs to one group of layers at a time."""
    return max((_group_bytes(group) for group in config.kv_cache_groups), default=0)


def largest_buffer_of(config: Any, pool_bytes: int) -> int:
    """Bytes of the largest single buffer of the pool, on one rank: layers may have their own, or share one."""
    sizes = [int(one.size) for one in getattr(config, "kv_cache_tensors", ())]
    return min(max(sizes, default=pool_bytes), pool_bytes)


def _group_bytes(group: Any) -> int:
    spec = group.kv_cache_spec
    layers = 1 if hasattr(spec, "kv_cache_specs") else len(group.layer_names)  # specs of several layers add up already
    return int(spec.page_size_bytes) * layers


class Layout:
    """The block tables of one scheduler."""

    def __init__(self, scheduler: Any) -> None:
        manager = scheduler.kv_cache_manager
        self._managers = tuple(manager.coordinator.single_type_managers)
        # Of a state-space layer a block is a state, not a number of tokens.
        self._by_tokens = tuple(
            one for one in self._managers if not type(one.kv_cache_spec).__name__.startswith("Mamba"))
        size = getattr(scheduler, "hash_block_size", None) or getattr(manager.block_pool, "hash_block_size", None)
        self.block_size = int(self._by_tokens[0].block_size) if self._by_tokens else 0
        # Of several groups of layers, each has its own hashes: then evicted content is not looked for.
        self.hash_block_size = self.block_size if len(self._managers) == 1 and size in (None, self.block_size) else 0
        self._delayed: dict[str, Any] = {}

    def token_bytes(self, block_bytes: int) -> int:
        """Bytes of one token's keys and values in all groups of layers; 0 where no layer counts tokens."""
        return sum(block_bytes // int(one.block_size) for one in self._by_tokens)

    @staticmethod
    def key_of(digest: bytes) -> bytes:
        """A block's hash as the pool of one group of layers knows it: followed by the group's number, 0."""
        return digest + (0).to_bytes(4, "big")

    def table(self, request_id: str) -> list[Any]:
        """The blocks that a request holds."""
        return [block for one in self._managers for block in one.req_to_blocks.get(request_id, ()) if not block.is_null]

    def blocks_of(self, request_id: str) -> int:
        """How many blocks a request holds, those that it shares included."""
        total = 0
        for one in self._managers:
            table = one.req_to_blocks.get(request_id, ())
            # A window or a state leaves null blocks in its table; where all tokens are kept there are none.
            whole = type(one.kv_cache_spec).__name__.startswith(_WHOLE)
            total += len(table) if whole else sum(not block.is_null for block in table)
        return total

    def tails(self, requests: Iterable[Any], block_bytes: int) -> tuple[int | None, int | None]:
        """Tokens that fit into the last blocks of requests, unused, and their bytes; added up over groups of layers.

        Absent where no layer counts tokens.
        """
        if not self._by_tokens:
            return None, None
        tokens = size = 0
        for request in requests:
            computed = int(request.num_computed_tokens)
            for one in self._by_tokens:
                table = one.req_to_blocks.get(request.request_id, ())
                if table:
                    unused = max(0, len(table) * int(one.block_size) - computed)
                    tokens += unused
                    size += unused * block_bytes // int(one.block_size)
        return tokens, size

    def needs(self, request: Any, longest: int, hit_blocks: int) -> int:
        """Blocks for all tokens of a request beyond those found in the prefix cache; estimated."""
        tokens = min(int(request.num_tokens), longest)
        wanted = sum(-(-tokens // int(one.block_size)) for one in self._by_tokens)
        wanted += len(self._managers) - len(self._by_tokens)
        return max(0, wanted - hit_blocks)

    # -- blocks that nobody alive holds ----------------------------------------------------------------

    def delayed(self, request: Any) -> None:
        """A request that ended keeps its blocks for a transfer."""
        self._delayed[request.request_id] = request

    def released(self, request: Any) -> None:
        """A request's blocks were given back."""
        self._delayed.pop(request.request_id, None)

    def pinned(self, scheduler: Any) -> int:
        """The null block, and blocks that wait for a step or a transfer of requests that ended."""
        deferred = getattr(scheduler, "deferred_frees", None)
        if not deferred and not self._delayed:
            return 1
        waiting = {block.block_id for _, blocks in deferred or () for block in blocks}
        waiting |= {block.block_id for request_id in self._delayed for block in self.table(request_id)}
        if waiting:
            alive = [request_id for request_id in scheduler.requests if request_id not in self._delayed]
            waiting -= {block.block_id for request_id in alive for block in self.table(request_id)}
        return 1 + len(waiting)

    def held(self, scheduler: Any) -> set[int]:
        """The numbers of all blocks that live requests hold."""
        return {block.block_id for request_id in scheduler.requests if request_id not in self._delayed
                for block in self.table(request_id)}
