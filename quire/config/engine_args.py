"""Every option of the engine: `LLM(...)`, `EngineArgs(...)` and the command line's flags all come from this one class.

A field is an option, its ``help`` the documentation and the flag's text. `EngineArgs.resolve` checks the options
against the model's own configuration, once, and returns the frozen `EngineConfig` that the engine is built from.
"""

import dataclasses
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from quire.config.config_json import read_json
from quire.config.families import drafting_method
from quire.config.kv_events import KVEventsConfig
from quire.config.model import ModelConfig
from quire.config.options import check_options, option, option_of, read_options
from quire.config.quantized import KeptMethod, MadeMethod, check_method
from quire.config.scheduler import POLICY_OPTIONS, PolicyName, PolicyOptions, SchedulerConfig
from quire.config.speculative import CACHED_METHODS, EAGLE_METHODS, HEAD_METHODS, SpeculativeConfig, check_draft_model
from quire.errors import ConfigError, InvalidRequestError, ModelLoadError, NotYetSupportedError
from quire.sampling_params import GENERATION_KEYS, SamplingParams
from quire.utils.answers import take_anyway
from quire.utils.hub import HEAD_PATTERNS, resolve_model_path
from quire.utils.values import decimal

logger = logging.getLogger(__name__)

_DRAFTING = Path(__file__).with_name("speculative.txt")  # what is said of vLLM's options of speculative_config
_SWAP_SPACE_FOR_DISK = 1.0  # GiB, where nothing else is said
_Method = Literal[MadeMethod, KeptMethod, "gguf", "gptq_marlin", "awq_marlin"]
_Form = Literal["auto", "safetensors", "fastsafetensors", "runai_streamer", "mistral", "gguf", "bitsandbytes", "dummy"]
_Kernels = Literal["auto", "amx", "avx512_bf16", "avx512_vnni", "avx2", "neon_bf16", "neon_dot", "portable", "torch"]
MAX_LORA_RANK = 256
_OF_MODEL = ("dtype", "device", "max_model_len", "revision", "seed", "hf_overrides", "load_format", "download_dir")
_OF_MODEL += ("generation_config",)  # its options


@dataclass(frozen=True)
class EngineArgs:
    """The options of an engine, under vLLM's names.

    Raises:
        ConfigError: an option is out of its range; the message names the option, the value and the range.
        NotYetSupportedError: the option asks for a feature that this version lacks.
    """

    model: str = option("demo")
    """Model directory, hub id, or 'demo' for the small bundled model."""
    tokenizer: str | None = option(None)
    """Tokenizer directory or hub id; the model's own by default."""
    tokenizer_mode: Literal["auto", "hf", "slow", "mistral"] = option("auto")
    """'auto' and 'hf' read tokenizer.json, else vocab.json with merges.txt, else tokenizer.model; 'slow' a
    SentencePiece tokenizer.model; 'mistral' reads tokenizer.json, with a warning."""
    skip_tokenizer_init: bool = option(False)
    """Load no tokenizer: prompts and outputs are token ids only."""
    trust_remote_code: bool = option(False)
    """Accepted and without effect: code shipped with a model is never run."""
    dtype: str = option("auto")
    """Weights and activations: auto (the checkpoint's; on a CPU bfloat16 for float16, which has no compiled kernels),
    float32, bfloat16, float16."""
    quantization: _Method | None = option(None, short="-q")
    """Weight quantization made at load time: 'int8' (a scale per row) or 'int4' (one per 32 weights of a row), or
    'w8a8' (int8, and activations in eight bits with a scale per token: twice the speed of long prompts), or 'w4a8'
    (likewise with about int4's weights); with device='cuda' also 'fp8'. A quantized checkpoint's own is recognized;
    naming it asserts that it is so."""
    device: Literal["auto", "cuda", "cpu"] = option("auto")
    """Where the model runs: a GPU where torch finds one, unless 'cpu' is asked for."""
    fast_gemm: bool = option(False)
    """On a GPU, multiply by its library, whose sums depend on the batch: faster by a little, but answers are no more
    those of a request alone."""
    kernels: _Kernels = option("auto")
    """CPU kernels: auto (the best), amx, avx512_bf16, avx512_vnni, avx2, neon_bf16, neon_dot, portable, or torch: none
    of the compiled ones."""
    weight_cache: bool = option(True)
    """Keep packed weights on disk, so that the next start maps them instead of packing again."""
    weight_cache_size: float = option(64.0, over=0)
    """Most that packed weights of all models take on the disk, in GiB; the one used longest ago goes first."""
    load_format: _Form = option("auto")
    """'dummy' fills the model with random weights, for measurements; the others are 'auto': files say what they are.
    Where these are in Mistral's layout alone, or pickled, an error says what to do."""
    revision: str | None = option(None)
    """Branch, tag or commit of the model on the hub."""
    tokenizer_revision: str | None = option(None)
    """Branch, tag or commit of the tokenizer on the hub."""
    download_dir: str | None = option(None)
    """Where hub downloads are cached; the hub's default place if unset."""
    hf_overrides: dict[str, Any] | None = option(None)
    """Entries that replace those of the model's config.json (JSON)."""
    generation_config: str = option("auto", expands=True)
    """'auto' takes default sampling parameters from the model's generation_config.json, 'vllm' neutral ones; else from
    such a file, or that of a folder, and what ends a text there does so besides the model's. Its max_new_tokens is
    then a limit of what a server's requests ask for."""
    override_generation_config: dict[str, Any] | None = option(None)
    """Entries that replace, or add to, those of generation_config.json (JSON). A max_new_tokens is a limit of what
    a server's requests ask for."""
    seed: int = option(0, -(2**63), 2**63 - 1)
    """Keys the random numbers of requests that bring no seed of their own."""
    max_model_len: int | None = option(None, 1, unset=-1)
    """Longest prompt plus output, in tokens; the model's own limit, or what the KV cache holds, by default, and where
    it is -1."""
    max_num_seqs: int = option(256, 1, 10**5)
    """Most sequences that run in one step."""
    max_num_batched_tokens: int | None = option(None, 1)
    """Most tokens computed in one step; 2048 by default, or max_model_len where chunked prefill is off and that
    is more."""
    enable_chunked_prefill: bool = option(True)
    """Cut long prompts in chunks that ride along with decoding; off: a step is either prefill or decode."""
    long_prefill_token_threshold: int = option(0, 0)
    """Most tokens of one prompt in a step, so that several prompts share it; 0: no limit."""
    enable_prefix_caching: bool = option(True)
    """Keep the KV blocks of finished prompts for requests that begin alike."""
    scheduling_policy: PolicyName = option("fcfs")
    """Who comes first: first come first served; each request's priority (lower runs first); a fair share for each
    client; shortest first, aged; or by targets for the first and for each further token."""
    fair_input_weight: float = option_of(PolicyOptions, "fair_input_weight")
    fair_output_weight: float = option_of(PolicyOptions, "fair_output_weight")
    ageing_rate: float = option_of(PolicyOptions, "ageing_rate")
    ttft_target: float | None = option_of(PolicyOptions, "ttft_target")
    tpot_target: float | None = option_of(PolicyOptions, "tpot_target")
    kv_cache_dtype: Literal["auto", "int8", "fp8"] = option("auto")
    """Keys and values in the model's type, or in eight bits with a scale per token and head ('fp8' on a GPU only)."""
    block_size: int = option(32, 1, 2**14)
    """Tokens in a KV block, all of which is in memory once a token is written there."""
    gpu_memory_utilization: float | None = option(None, most=1, over=0, aliases=("device_memory_utilization",))
    """Share of the device's memory (on a CPU: of the free memory once the weights are loaded) for the engine; 0.92 on a
    GPU and 0.4 on a CPU by default."""
    kv_cache_memory: int | None = option(None, 1, aliases=("kv_cache_memory_bytes",))
    """Size of the KV cache in bytes; overrides gpu_memory_utilization."""
    num_kv_blocks: int | None = option(None, 1, aliases=("num_gpu_blocks_override",))
    """Number of KV blocks; overrides every measurement."""
    swap_space: float | None = option(None, 0, aliases=("kv_offloading_size",))
    """Host memory, in GiB, to which preempted requests and evicted prefixes go and come back; none by default, or 1
    GiB where kv_cache_dir is given."""
    kv_events_config: dict[str, Any] | None = option(None)
    """Publish what happens to cached KV blocks, as vLLM does: enable_kv_cache_events, endpoint, ... (JSON)."""
    kv_cache_dir: str | None = option(None, expands=True)
    """Folder in which prefixes outlive the engine: their KV blocks are written there, and read when they recur."""
    kv_cache_dir_size: float = option(32.0, over=0)
    """Most that all models' KV blocks take in that folder, in GiB; those unused for longest go first."""
    max_logprobs: int = option(20, -1)
    """Most logprobs that a request may ask for; -1 for no limit."""
    tensor_parallel_size: int = option(1, 1, short="-tp")
    """Processes that share each layer."""
    pipeline_parallel_size: int = option(1, 1, short="-pp")
    """Processes that share the stack of layers."""
    pp_partition: str | None = option(None)
    """Layers of each of those stages, as '10,14'; by default as even as may be, the last ones fewer."""
    data_parallel_size: int = option(1, 1, 1024, short="-dp")
    """Engines, each with a copy of the model."""
    data_parallel_router: Literal["cache_aware", "least_loaded", "round_robin"] = option("cache_aware")
    """Which engine gets a request: who has computed most of its prompt before, unless overloaded; the least loaded; or
    each in turn."""
    enable_expert_parallel: bool = option(False, short="-ep")
    """Each of the tensor_parallel_size ranks has some of the experts, and not a part of each."""
    distributed_executor_backend: Literal["uni", "mp", "ray", "external_launcher"] | None = option(None)
    """Where workers run: 'uni' (this process), 'mp' (processes of this machine), 'ray' (actors on a cluster), or
    'external_launcher' (this process and others that torchrun started); 'uni' by default for one worker, and 'mp'
    for more."""
    ray_placement: Literal["PACK", "STRICT_PACK", "STRICT_SPREAD"] = option("PACK")
    """Nodes of a Ray cluster: one for each stage where its ranks fit ('PACK'), one for all ranks, or one for each."""
    tp_collective: Literal["gather", "reduce"] = option("gather")
    """'gather': answers are those of one process, bit for bit; 'reduce': ranks meet half as often, but add up parts of
    sums: answers are not those of one process, though the same in every run and batch."""
    cpu_bind: str = option("auto")
    """Cores of the worker processes: 'auto' (an even share each), 'none', or a list by rank, as '0-1|2-3'."""
    speculative_config: dict[str, Any] | None = option(None, short="-sc")
    """Draft tokens ahead of the model, as {"method": "ngram", "num_speculative_tokens": 4} says."""
    enable_lora: bool = option(False)
    """Let requests run with adapters (LoRA)."""
    max_loras: int = option(8, 1, 10**4)
    """Most adapters that a step mixes; those unused for longest make room."""
    max_lora_rank: int = option(16, 1, MAX_LORA_RANK)
    """Highest rank of an adapter."""
    max_cpu_loras: int | None = option(None, 1)
    """Most adapters kept in memory; four times as many as a step mixes by default."""
    enable_prompt_adapter: bool = option(False)
    """Let requests run with prompt adapters: virtual tokens before their prompts."""
    max_prompt_adapters: int = option(8, 1, 10**4)
    """Most adapters that a step mixes, beside max_loras: these and LoRAs share all their places."""
    max_prompt_adapter_token: int = option(128, 1)
    """Most virtual tokens of an adapter."""
    enforce_eager: bool = option(False)
    """On a GPU, run all steps kernel by kernel, and none as captured graphs; a CPU has none."""
    stream_interval: int = option(1, 1)
    """Tokens that a stream gathers for each of its pieces; the first token comes at once, and the last ones."""
    disable_log_stats: bool = option(False)
    """Do not gather per-request timings: outputs have no metrics. Nor does a server log how busy it is."""
    debug: bool = option(False)
    """Check the engine's invariants at every step and poison fresh KV blocks with NaN."""

    def __post_init__(self) -> None:
        check_options(self)
        if (given := self.speculative_config) is not None:
            shown = "speculative_config: {}".format
            own = {name: v for name, v in given.items() if not take_anyway(_DRAFTING, name, v, shown(name))}
            SpeculativeConfig.read(own)
            vars(self)["speculative_config"] = own
        if self.trust_remote_code:
            logger.warning("trust_remote_code=True has no effect: Quire never runs code that comes with a model")
        if (most := self.max_cpu_loras) is not None and most < self.max_loras:
            raise ConfigError(f"max_cpu_loras={most} is below max_loras={self.max_loras}: raise it, or lower that.")
        if self.kv_cache_dir is not None and self.swap_space == 0:
            raise ConfigError("kv_cache_dir needs swap_space: blocks come back through host memory. Set it above 0.")
        if self.kv_cache_dir is not None and not self.enable_prefix_caching:
            raise ConfigError("kv_cache_dir keeps prefixes: it needs enable_prefix_caching=True.")
        if self.enable_expert_parallel and self.tensor_parallel_size == 1:
            raise ConfigError("enable_expert_parallel=True shares experts among ranks: raise tensor_parallel_size.")
        if self.tp_collective == "reduce" and self.tensor_parallel_size == 1:
            raise ConfigError("tp_collective='reduce' sums up parts of ranks: raise tensor_parallel_size above 1.")
        backend = self.distributed_executor_backend
        if backend == "external_launcher" and max(self.pipeline_parallel_size, self.data_parallel_size) > 1:
            raise NotYetSupportedError("'external_launcher' has one engine, and no stages yet; use 'mp' for these.")
        if self.cpu_bind not in ("auto", "none") and (backend == "ray" or not self.has_processes):
            raise ConfigError(f"cpu_bind={self.cpu_bind!r} needs distributed_executor_backend='mp'; give that too.")

    @property
    def num_adapter_places(self) -> int:
        """Adapters that a step may mix, of both kinds."""
        return self.max_loras * self.enable_lora + self.max_prompt_adapters * self.enable_prompt_adapter

    def partition(self, num_layers: int) -> tuple[int, ...]:
        """Layers of each stage of a model with so many (ConfigError where they can't be shared so)."""
        if (stages := self.pipeline_parallel_size) > num_layers:
            raise ConfigError(f"pipeline_parallel_size={stages} exceeds the model's {num_layers} layers; lower it.")
        if self.pp_partition is None:
            return tuple((num_layers + stages - 1 - stage) // stages for stage in range(stages))
        given = tuple(decimal(part.strip()) or 0 for part in self.pp_partition.split(","))
        if len(given) != stages or sum(given) != num_layers or not all(given):
            raise ConfigError(
                f"pp_partition={self.pp_partition!r:.80} must be {stages} numbers above 0 (pipeline_parallel_size), as "
                f"'10,14', that sum to the model's {num_layers} layers; leave it out for equal stages."
            )
        return given

    @property
    def num_ranks(self) -> int:
        """Workers of one engine."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def has_processes(self) -> bool:
        """Whether workers are processes of their own."""
        backend = self.distributed_executor_backend
        return backend in ("mp", "ray") or (self.num_ranks > 1 and backend != "external_launcher")

    def _generation_overrides(self) -> dict[str, Any]:
        given = self.override_generation_config or {}
        if unknown := [key for key in given if key not in GENERATION_KEYS]:
            raise ConfigError(f"override_generation_config: {unknown[0]!r} is none of {', '.join(GENERATION_KEYS)}.")
        try:
            SamplingParams.from_generation_defaults(given)
        except InvalidRequestError as error:
            raise ConfigError(f"override_generation_config: {error}") from None
        return given

    def resolve(self) -> "EngineConfig":
        """Read the model's configuration and check the options against it.

        Raises:
            ConfigError: options contradict each other or the model.
            ModelLoadError: the model's files are missing or broken.
        """
        model = ModelConfig.from_pretrained(self.model, **{name: getattr(self, name) for name in _OF_MODEL})
        model = dataclasses.replace(model, generation_defaults=model.generation_defaults | self._generation_overrides())
        quantization = check_method(self.quantization, model.hf_config, model.model, self.device == "cuda")
        budget = 2048 if self.enable_chunked_prefill else max(2048, model.max_model_len)
        speculative = self._speculative()
        self.partition(model.num_layers)
        if (ranks := self.tensor_parallel_size) > model.num_heads:
            raise ConfigError(f"tensor_parallel_size={ranks} exceeds the model's {model.num_heads} heads; lower it.")
        if speculative is not None and self.pipeline_parallel_size > 1:
            speculative.check_stages(self.pipeline_parallel_size)
        method = None if speculative is None else speculative.method
        return EngineConfig(
            args=self,
            model=model,
            quantization=quantization,
            scheduler=SchedulerConfig(
                max_num_batched_tokens=self.max_num_batched_tokens or budget,
                max_num_seqs=self.max_num_seqs,
                max_model_len=model.max_model_len,
                policy=self.scheduling_policy,
                policy_options=PolicyOptions(**{name: getattr(self, name) for name in POLICY_OPTIONS}),
                enable_chunked_prefill=self.enable_chunked_prefill,
                long_prefill_token_threshold=self.long_prefill_token_threshold,
                num_stages=self.pipeline_parallel_size,
                max_num_drafts=speculative.max_drafts if speculative is not None else 0,
                draft_tree=speculative.tree if speculative is not None else None,
                # A tree's nodes and a rule's drafts are no others'.
                drafts_forced=speculative is None or (speculative.tree is None and speculative.acceptance == "exact"),
            ),
            speculative=speculative,
            draft=self._draft_model(speculative, model) if speculative and method in CACHED_METHODS else None,
            heads=self._heads(speculative) if speculative and method in HEAD_METHODS else None,
            kv_events=read_options(KVEventsConfig, self.kv_events_config or {}, "kv_events_config"),
        )

    def _speculative(self) -> SpeculativeConfig | None:
        """How tokens are drafted; where no method is named, as suits what the model that drafts is."""
        if (given := self.speculative_config) is None:
            return None
        if (name := (read := SpeculativeConfig.read(given)).model) is None:
            return read
        try:
            path = self._heads(read, ("config.json",))
            config = {} if path.is_file() else read_json(path, "config.json", name)
        except ModelLoadError as error:
            raise ModelLoadError(f"speculative_config: {error}") from None
        return SpeculativeConfig.read({**given, "method": drafting_method(given.get("method"), config, name)})

    def _draft_model(self, speculative: SpeculativeConfig, model: ModelConfig) -> ModelConfig:
        """The configuration of the model, or the head, that drafts, held against that of the model it drafts for."""
        if speculative.method in EAGLE_METHODS:
            return self._eagle_head(speculative, model)
        files: Any = {"dtype": model.dtype, "revision": speculative.revision, "download_dir": self.download_dir}
        draft = ModelConfig.from_pretrained(speculative.model or "", load_format=self.load_format, **files)
        check_draft_model(draft, model)
        return draft

    def _heads(self, speculative: SpeculativeConfig, files: tuple[str, ...] = HEAD_PATTERNS) -> Path:
        """Where the heads that draft are, or some files of what drafts."""
        name, cache = speculative.model or "", self.download_dir
        return resolve_model_path(name, speculative.revision, cache_dir=cache, allow_patterns=files)

    def _eagle_head(self, speculative: SpeculativeConfig, model: ModelConfig) -> ModelConfig:
        """The configuration of a head that has layers of its own; the worker holds it against the model's."""
        path = self._heads(speculative)
        stated = ModelConfig.from_pretrained(path, dtype=model.dtype, load_format=self.load_format)
        # Positions are the model's: what a head was trained on is often shorter.
        reach = {"max_position_embeddings": max(stated.derived_max_model_len, model.max_model_len)}
        head = ModelConfig.from_pretrained(path, dtype=model.dtype, load_format=self.load_format, hf_overrides=reach)
        return dataclasses.replace(head, model=speculative.model or "")


@dataclass(frozen=True)
class EngineConfig:
    """The options, resolved: what every room of the engine is built from."""

    args: EngineArgs
    model: ModelConfig
    scheduler: SchedulerConfig
    speculative: SpeculativeConfig | None = None
    draft: ModelConfig | None = None
    heads: Path | None = None
    quantization: str | None = None  # a checkpoint's own method, too
    kv_events: KVEventsConfig = KVEventsConfig()

    @property
    def swap_bytes(self) -> int:
        """Host memory for swapped blocks, and for those that come from the disk."""
        default = _SWAP_SPACE_FOR_DISK if self.args.kv_cache_dir is not None else 0.0
        return int((default if self.args.swap_space is None else self.args.swap_space) * 2**30)

    def default_sampling_params(self) -> SamplingParams:
        """What a request without parameters gets: the model's generation_config.json, unless told otherwise."""
        return SamplingParams.from_generation_defaults(self.model.generation_defaults)

    def with_max_model_len(self, max_model_len: int) -> "EngineConfig":
        """The same configuration for a shorter context (what the KV cache turned out to hold)."""
        model = dataclasses.replace(self.model, max_model_len=max_model_len)
        scheduler = dataclasses.replace(self.scheduler, max_model_len=max_model_len)
        return dataclasses.replace(self, model=model, scheduler=scheduler)
