"""EAGLE (arXiv:2401.15077) and EAGLE-3 (arXiv:2503.01840): a layer that goes on from a model's hidden states.

It reads each token together with the hidden state from which the token was drawn, and what leaves it stands for the
hidden state of the next one. The worker builds one beside the model, whose embedding and output head it shares, and
compiles it as a model is. Must not know sequences, nor a checkpoint's files.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from quire.attention.step import Step
from quire.config.model import ModelConfig
from quire.errors import ModelLoadError
from quire.layers.norm import RMSNorm
from quire.models.builder import AttentionForm, Builder
from quire.models.causal_lm import CausalLM
from quire.models.heads import spread_logits
from quire.models.llama import build_rope, llama_attention
from quire.models.settings import count, number
from quire.protocol.cache import LayerCache
from quire.quantization.base import CheckpointSlot, TensorForm


class Vocabulary(nn.Module):
    """The tokens that a head draws from, where they are fewer than the model's: `d2t`, the distance of each id."""

    def __init__(self, size: int, num_tokens: int) -> None:
        super().__init__()
        self.num_tokens = num_tokens
        self.token_ids = torch.arange(size)

    def checkpoint_slots(self, path: str) -> Iterator[CheckpointSlot]:
        """The place of its tensor; `path` is where the module stands."""
        yield CheckpointSlot(path, TensorForm((len(self.token_ids),), (torch.int64, torch.int32)), self._load)

    def spread(self, logits: Tensor) -> Tensor:
        """[R, size] -> [R, V]."""
        return spread_logits(logits, self.token_ids, self.num_tokens)

    def _load(self, distances: Tensor) -> None:
        found = torch.arange(len(distances)) + distances
        if found.min() < 0 or found.max() >= self.num_tokens or len(found.unique()) < len(found):
            raise ModelLoadError(
                f"the head's d2t maps its tokens to ids from {found.min()} to {found.max()}, each once, and the model "
                f"has {self.num_tokens} tokens: it was trained for another vocabulary."
            )
        self.token_ids = found


class EagleLayer(nn.Module):
    """One layer on a token's embedding and the hidden state before it; keys and values begin at position 1.

    Args:
        tensors: names in the checkpoint, which decide about norms and biases that some have and some have not.
        reads_both: EAGLE-3's first layer, whose attention reads embedding and hidden state side by side.
    """

    def __init__(self, config: ModelConfig, builder: Builder, tensors: Collection[str], reads_both: bool) -> None:
        super().__init__()
        size, eps = config.hidden_size, number(config, "rms_norm_eps", 1e-6)
        hf, biased = config.hf_config, ("self_attn.q_proj", "self_attn.o_proj", "mlp.up_proj")
        qkv_bias, output_bias, mlp_bias = (f"{builder.prefix}.{name}.bias" in tensors for name in biased)
        self.norm_before_residual = bool(hf.get("norm_before_residual", False))
        normed = reads_both or f"{builder.prefix}.input_layernorm.weight" in tensors
        self.input_layernorm = builder.rms_norm(size, eps) if normed else None
        self.hidden_norm = builder.rms_norm(size, eps) if reads_both else None
        spec = replace(llama_attention(config, build_rope(config)), start=1)
        read, activation = (size, size) if reads_both else size, str(hf.get("hidden_act", "silu"))
        self.self_attn = builder.child("self_attn").attention(read, spec, AttentionForm(qkv_bias, output_bias))
        self.post_attention_layernorm = builder.rms_norm(size, eps)
        self.mlp = builder.child("mlp").gated_mlp(size, config.intermediate_size, activation=activation, bias=mlp_bias)

    def forward(self, x: Tensor, embedded: Tensor, step: Step) -> Tensor:
        """[T, H] -> [T, H]; `embedded` is read where `reads_both`."""
        residual = x
        if self.hidden_norm is not None and self.input_layernorm is not None:
            normed = self.hidden_norm(x)
            residual = normed if self.norm_before_residual else x
            attended = self.self_attn((self.input_layernorm(embedded), normed), step)
        else:
            attended = self.self_attn(x if self.input_layernorm is None else self.input_layernorm(x), step)
        x, residual = self.post_attention_layernorm.add(attended, residual)
        return self.mlp(x, step) + residual


class EagleHead(nn.Module):
    """Token ids and the hidden states before them -> hidden states -> logits.

    Args:
        config: the head's own.
        tensors: names of its checkpoint's tensors, as the modules here have them.
        taps: EAGLE-3: indices of the model's layers whose outputs it reads; None for EAGLE, which reads the last hidden
            state.

    Attributes:
        num_hidden: features of the hidden states that it goes on from.
        layers_read: of `taps`, each once, ascending.
    """

    def __init__(
        self,
        config: ModelConfig,
        builder: Builder,
        model: CausalLM,
        tensors: Collection[str],
        taps: Sequence[int] | None,
    ) -> None:
        super().__init__()
        size, of_model, self._model = config.hidden_size, model.embedding.shape.in_features, (model,)
        self.vocab_size, self.dtype, self.num_hidden = model.vocab_size, model.dtype, size
        self.layers_read = tuple(sorted(set(taps or ())))
        self._places = [self.layers_read.index(tap) for tap in taps or ()]
        own_table = "embed_tokens.weight" in tensors and size != of_model
        self.embed_tokens = builder.embedding("embed_tokens", config.vocab_size, size) if own_table else None
        self.joins = taps is None
        widths = [size, of_model] if self.joins else [of_model] * len(self._places)
        self.fc = builder.joined("fc", widths, size, bias="fc.bias" in tensors) if widths else None

        def layer(index: int, builder: Builder) -> EagleLayer:
            return EagleLayer(config, builder, tensors, reads_both=not self.joins and not index)

        self.layers = nn.ModuleList(builder.layers(config.num_layers, layer))
        self.norm: RMSNorm | None = None
        self.lm_head: nn.Module | None = None
        self.d2t: Vocabulary | None = None
        if not self.joins:
            self.norm = builder.rms_norm(size, number(config, "rms_norm_eps", 1e-6))
            num_drawn = count(config, "draft_vocab_size", model.vocab_size) if tensors else model.vocab_size
            if "lm_head.weight" in tensors:
                self.lm_head = builder.linear("lm_head", size, num_drawn)
            if "d2t" in tensors or num_drawn != model.vocab_size:
                self.d2t = Vocabulary(num_drawn, model.vocab_size)
        self.context = builder.context

    @property
    def cache_layers(self) -> list[LayerCache]:
        """What each attention layer keeps of a token."""
        return self.context.cache_layers

    def fuse(self, hidden: Sequence[Tensor]) -> Tensor:
        """What `forward` reads of the model's states: the last one, or of `layers_read`; [T, H] each -> [T, H]."""
        return hidden[0] if self.joins or self.fc is None else self.fc([hidden[place] for place in self._places])

    def forward(self, input_ids: Tensor, hidden: Tensor, step: Step) -> Tensor:
        """[T] ids and [T, H], of the position before each -> [T, H]; writes to the step's caches."""
        table = self._model[0].embedding if self.embed_tokens is None else self.embed_tokens
        embedded = table(input_ids, step)
        x = self.fc([embedded, hidden], step) if self.joins and self.fc is not None else hidden
        for layer in self.layers:
            x = layer(x, embedded, step)
        return x

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """[R, H] -> logits of the tokens that it draws from, [R, V] unless there is a `d2t`."""
        if self.norm is not None:
            hidden = self.norm(hidden)
        return self._model[0].compute_logits(hidden) if self.lm_head is None else self.lm_head(hidden, wide=True)

    def spread(self, logits: Tensor) -> Tensor:
        """Its logits by the model's token ids, [R, V]."""
        return logits if self.d2t is None else self.d2t.spread(logits)
