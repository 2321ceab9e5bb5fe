"""Configuration of a worker: exactly what is read below the executor's door.

The engine makes it from its options; an executor hands it to each worker. It holds numbers and names only.
"""

from dataclasses import dataclass
from pathlib import Path

from quire.config.draft_tree import DraftTree
from quire.config.engine_args import EngineArgs
from quire.config.model import ModelConfig
from quire.config.speculative import SpeculativeConfig


@dataclass(frozen=True)
class Stage:
    """A part of a model's stack of layers, and what stands before and after the stack where it reaches that far."""

    number: int
    layers: range
    is_first: bool = True
    is_last: bool = True


@dataclass(frozen=True)
class WorkerConfig:
    """What one worker runs, and the largest step that it must be able to carry out.

    Attributes:
        model: the model's own configuration and where its files are.
        block_size: tokens in a KV block.
        max_num_seqs: most rows held at once.
        max_num_batched_tokens: most tokens computed in one step.
        max_num_drafts: most draft tokens of a row in one step.
        draft_tree: their shape, where they are no chain.
        speculative: how they are drafted, where they are.
        draft: the model that drafts them, where one does.
        heads: the folder of heads that draft them, where some do.
        quantization: weight format made at load time, or the method of a checkpoint that has one; else None.
        kv_cache_dtype: "auto" for the model's, or the name of a cache format.
        device: "auto", "cpu" or "cuda".
        kernels: level of compiled kernels, "auto" or "torch".
        enforce_eager: capture no graphs on a GPU.
        fast_gemm: let a GPU's library multiply, whose sums depend on the batch.
        load_format: as `EngineArgs.load_format`; or "none", to plan: weights are zeros that take no memory.
        weight_cache: keep packed weights on disk.
        weight_cache_size: most that all models' packed weights may take there, in GiB.
        swaps: there will be host blocks, so that the speed of copies matters.
        kv_cache_dir: folder for KV blocks that outlive the engine; None: they don't.
        kv_cache_dir_size: most that they may take there, in GiB.
        debug: poison fresh KV blocks with NaN.
        rank: which of the workers that share the model it is.
        num_ranks: how many share it: stages, each of as many ranks; first all of the first stage.
        partition: layers of each stage, as `EngineArgs.partition`; () for one of them all.
        enable_expert_parallel: ranks have whole experts of mixtures.
        tp_collective: "gather", or "reduce" where ranks sum up parts of products.
        max_loras: adapters that a step may mix; 0 for none at all.
        max_lora_rank: most that they may have; 0 where they are virtual tokens alone.
        max_cpu_loras: most of them that are kept in memory.
        group: name of the memory, or the store in a network, through which they meet; None for one alone.
        nodes: the machine of each rank; () for one.
    """

    model: ModelConfig
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_num_drafts: int = 0
    draft_tree: DraftTree | None = None
    speculative: SpeculativeConfig | None = None
    draft: ModelConfig | None = None
    heads: Path | None = None
    quantization: str | None = None
    kv_cache_dtype: str = "auto"
    device: str = "auto"
    kernels: str = "auto"
    enforce_eager: bool = False
    fast_gemm: bool = False
    load_format: str = "auto"
    weight_cache: bool = True
    weight_cache_size: float = EngineArgs.weight_cache_size
    swaps: bool = False
    kv_cache_dir: str | None = None
    kv_cache_dir_size: float = EngineArgs.kv_cache_dir_size
    debug: bool = False
    rank: int = 0
    num_ranks: int = 1
    partition: tuple[int, ...] = ()
    enable_expert_parallel: bool = False
    tp_collective: str = "gather"
    max_loras: int = 0
    max_lora_rank: int = 16
    max_cpu_loras: int = 0
    group: str | None = None
    nodes: tuple[str, ...] = ()

    @property
    def num_stages(self) -> int:
        """Stages of the pipeline."""
        return max(1, len(self.partition))

    @property
    def tensor_size(self) -> int:
        """Ranks that share each layer of a stage."""
        return self.num_ranks // self.num_stages

    @property
    def num_sharers(self) -> int:
        """Ranks that share the memory of its machine."""
        return self.nodes.count(self.nodes[self.rank]) if self.nodes else self.num_ranks

    @property
    def reporter(self) -> int:
        """The rank whose results are everybody's: the first one of the last stage."""
        return self.num_ranks - self.tensor_size

    @property
    def stage(self) -> Stage:
        """Its part of the layers."""
        number, parts = self.rank // self.tensor_size, self.partition or (self.model.num_layers,)
        start = sum(parts[:number])
        return Stage(number, range(start, start + parts[number]), number == 0, number == len(parts) - 1)
