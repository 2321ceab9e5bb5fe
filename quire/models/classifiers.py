"""A head for classes, of a checkpoint that has one for tokens alone: Qwen3-Reranker's, as it is published.

Which token answers for which class is told by the configuration (vLLM's `classifier_from_token`).
`quire.models.sources` asks; what the head is for is `quire.models.causal_lm`'s.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace

from torch import Tensor

from quire.config.model import ModelConfig
from quire.errors import ModelLoadError
from quire.models.weights import Cut, TensorSpec
from quire.text.tokenizer import load_tokenizer


def head_of_tokens(config: ModelConfig) -> Callable[[TensorSpec, int], Iterable[Cut]] | None:
    """What makes the head of tokens' rows in the one for tokens; for one class, of two rows' difference.

    None where the checkpoint has the head. Raises ModelLoadError where the tokenizer has no such token.
    """
    tokens = config.hf_config.get("classifier_from_token")
    if not tokens or not config.num_labels:
        return None
    ids = load_tokenizer(config.path).convert_tokens_to_ids(tokens)
    if None in ids:
        raise ModelLoadError(f"classifier_from_token = {tokens!r} has a token that {config.model!r} does not have.")

    def take(table: Tensor) -> Tensor:
        rows = table[ids]
        return rows if config.num_labels == len(ids) else (rows[1:].float() - rows[:1].float()).to(table.dtype)

    def cut(spec: TensorSpec, hidden_size: int) -> Iterable[Cut]:
        is_head = spec.name == "lm_head.weight"
        if not is_head:
            yield spec, lambda tensor: tensor
        if spec.name.endswith("embed_tokens.weight") if config.tie_word_embeddings else is_head:
            yield replace(spec, name="score.weight", shape=(config.num_labels, hidden_size), num_bytes=0), take

    return cut
