"""Options of vLLM that Quire does not have, by name: what to say to someone who gives one.

Read where an unknown option is refused, by `EngineArgs` and the command line. An entry goes when its feature comes.
"""

_LATER = """
    additional_config allowed_local_media_path api_server_count async_scheduling calculate_kv_scales
    chat_template_content_format compilation_config config convert cpu_offload_gb data_parallel_rank
    decode_context_parallel_size default_chat_template_kwargs
    enable_server_load_tracking enable_sleep_mode
    enable_tokenizer_info_endpoint expert_parallel_size guided_decoding_backend io_processor_plugin
    kv_transfer_config limit_mm_per_prompt logits_processor_pattern logits_processors
    max_num_partial_prefills middleware mm_processor_kwargs
    num_speculative_tokens pooler_config runner speculative_model
    structured_outputs_config tool_parser_plugin
"""
_INSTEAD = {
    "O": "leave it out: nothing is compiled at start-up",
    "device": "leave it out: the machine's processor is used",
    "kv_offloading_size": "give swap_space, in GiB",
    "cpu_kvcache_space": "give kv_cache_memory",
}


def not_yet(name: str) -> str | None:
    """What to say of the option `name` (underscores, no dashes before it): a sentence, or None for a name not known."""
    if name in _LATER.split():
        return "is not supported yet."
    return f"is not an option here: {_INSTEAD[name]}." if name in _INSTEAD else None
