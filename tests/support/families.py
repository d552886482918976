"""Build tiny models of every family in transformers."""

import json
import shutil

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

# Each small size is followed by the settings that get this size. Families name the same setting
# differently, and shrink() skips the settings that a family does not have.
SIZES = {
    384: "vocab_size vocab_size_per_layer_input",
    64: """intermediate_size ffn_dim ffn_hidden_size encoder_ffn_dim decoder_ffn_dim
        max_position_embeddings n_positions n_ctx""",
    32: """hidden_size d_model n_embd word_embed_proj_dim lru_width moe_intermediate_size
        shared_expert_intermediate_size qk_head_dim""",
    16: """head_dim linear_key_head_dim linear_value_head_dim linear_head_dim v_head_dim
        qk_nope_head_dim qk_rope_head_dim q_lora_rank kv_lora_rank hidden_size_per_layer_input
        mamba_d_state mamba_d_head state_size""",
    8: "rotary_dim",
    4: "num_local_experts num_experts n_routed_experts mamba_n_heads",
    2: """num_hidden_layers n_layer n_layers num_layers num_attention_heads n_head n_heads num_heads
        num_key_value_heads linear_num_key_heads linear_num_value_heads linear_num_heads
        num_experts_per_tok moe_k moe_topk eos_token_id""",
    1: "bos_token_id",
    0: "pad_token_id",
}
SMALL = {name: size for size, names in SIZES.items() for name in names.split()}
# Small models of these families need these settings, which add to the sizes in SMALL or replace
# them.
OWN_SETTINGS = {
    "axk1": {"n_group": 2, "topk_group": 1},
    "codegen": {"n_head": 4},
    "deepseek_v2": {"num_experts_per_tok": 2, "n_group": 2, "topk_group": 1},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "falcon_h1": {"mamba_d_ssm": 64},
    "gemma3n_text": {"num_kv_shared_layers": 0, "intermediate_size": 64},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 4, "n_groups": 1},
    "marian": {"decoder_vocab_size": 384},
    "mimo_v2_flash": {"num_attention_heads": 8, "num_key_value_heads": 4},
    "ministral": {"head_dim": 16},
    "nemotron": {"num_key_value_heads": 2},
    "plbart": {"decoder_attention_heads": 2},
    "reformer": {"is_decoder": True, "axial_pos_shape": [4, 8], "axial_pos_embds_dim": [16, 16]},
    "whisper": {"decoder_attention_heads": 2},
    "xlnet": {"d_head": 16},
    "xlstm": {"embedding_dim": 32},
    "xmod": {"default_language": "en_XX", "is_decoder": True},
    "zaya": {"num_experts_per_tok": 1},
}
OWN_SETTINGS["mimo_v2_flash"] |= {"swa_num_key_value_heads": 8}
# Zamba2 needs more settings, because its layers share a block.
OWN_SETTINGS["zamba2"] = {"layers_block_type": ["hybrid"] * 2, "hybrid_layer_ids": [0, 1]}
OWN_SETTINGS["zamba2"] |= {"mamba_headdim": 8, "attention_hidden_size": 64}
OWN_SETTINGS["zamba2"] |= {"attention_head_dim": 32}
# In each of these variants, a setting changes the attention, the loss or the weights of a family.
VARIANTS = """mistral+sliding_window=8 gemma3_text+sliding_window=8 qwen2_moe+sliding_window=8
    phi3+sliding_window=8 starcoder2+sliding_window=8 cohere2+sliding_window=8
    olmo3+sliding_window=8 modernbert-decoder+sliding_window=8
    llama4_text+attention_chunk_size=8 llama4_text+no_rope_layer_interval=2
    gemma3_text+use_bidirectional_attention=true bert+is_decoder=true roberta+is_decoder=true
    deepseek_v32+index_topk=8 glm_moe_dsa+index_topk=8 dots3_note_text+index_topk=8
    qwen3_moe+output_router_logits=true mixtral+output_router_logits=true
    llama+tie_word_embeddings=true cohere+logit_scale=0.25 cohere+use_qk_norm=true
    granite+logits_scaling=4.0 gemma2+final_logit_softcapping=5.0 llama+longrope
    zamba2+num_mem_blocks=2""".split()
# With these settings, the angles of the rotary embedding depend on the sequence length.
LONG_ROPE = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 16}
LONG_ROPE |= {"factor": 4.0, "short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
# Each entry is the name of a family; a variant adds `+` and a setting to this name.
VARIED_FAMILIES = [*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *VARIANTS]
# The tests do not compare small models of these families; each value is the reason.
NOT_COMPARED = {
    "longcat_flash": "with few tokens, a rank may use no expert, and FSDP fails",
}
# Train these models with a lower learning rate, because their rounding errors grow fast.
SENSITIVE = ["gemma4_unified_text"]
MOST_WEIGHTS = 20_000_000
MODERN = ["llama", "mistral", "qwen2", "qwen3", "gemma", "gemma3_text", "phi3", "olmo2", "gpt2"]
MODERN += ["gpt_neox", "opt", "mixtral", "qwen3_moe", "apertus", "granite", "cohere", "diffllama"]
ARGS = {"model_name": "a", "pretrained": False, "compile": False, "seed": 0, "seq_length": 16}
ARGS |= {"replicas": 1, "precision": "fp32", "cpu_offload": False, "reshard_after_forward": True}
ARGS |= {"recompute": "none", "device": "cpu", "global_batch_size": 8, "attention": "sdpa"}


def shrink(config, **settings):
    """Return a copy of a configuration with fewer and smaller layers, and with `settings`."""
    values = config.to_dict()
    # Drop settings that have one entry per layer, because the small model has fewer layers.
    values.pop("per_layer_config", None)
    num_layers = getattr(config, "num_hidden_layers", None)
    for name in [name for name in values if isinstance(values[name], list)]:
        if len(values[name]) == num_layers:
            del values[name]
    sizes = {config.attribute_map.get(name, name): value for name, value in SMALL.items()}
    sizes = {name: value for name, value in sizes.items() if values.get(name)}
    return type(config)(**values | sizes | settings)


def fast_byte_tokenizer():
    """Return a byte tokenizer of the type that Mistral and Mixtral need."""
    letters = ["</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(BPE({letter: number for number, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")


def save_small_model(family, folder):
    """Save the configuration of a small model of a family, and a byte tokenizer, to `folder`.

    `family` may end with a setting, such as `llama+tie_word_embeddings=true`. Raise ValueError if
    the tests cannot compare a small model of this family.
    """
    kind, *settings = family.split("+")
    if kind in NOT_COMPARED:
        raise ValueError(NOT_COMPARED[kind])
    if settings == ["longrope"]:
        settings = [f"rope_parameters={json.dumps(LONG_ROPE)}"]
    pairs = (word.split("=") for word in settings)
    settings = OWN_SETTINGS.get(kind, {}) | {name: json.loads(value) for name, value in pairs}
    try:
        config = CONFIG_MAPPING[kind]()
        # Turn off dropout and the noise of routers, because their random values depend on the
        # layout.
        rates = [name for name in config.to_dict() if "drop" in name or "jitter" in name]
        rates = [name for name in rates if isinstance(getattr(config, name), float)]
        config = shrink(config, **dict.fromkeys(rates, 0.0) | settings)
        with torch.device("meta"):
            num_weights = AutoModelForCausalLM.from_config(config).num_parameters()
    except Exception as error:
        message = " ".join(str(error).split())
        raise ValueError(f"{type(error).__name__}: {message[-200:]}") from error
    if num_weights > MOST_WEIGHTS:
        raise ValueError(f"{num_weights:,} weights")
    config.save_pretrained(folder)
    fast_byte_tokenizer().save_pretrained(folder)


def make_hub_folder(
    models, root, family, max_shard_size="5GB", dtype=torch.bfloat16, headless=False
):
    """Save a model with random weights in the format of the hub; return the model's folder.

    With `headless`, leave out the output layer.
    """
    folder = root / f"{family}-{max_shard_size}-{str(dtype)[6:]}{'-headless' * headless}"
    torch.manual_seed(1)
    config = AutoConfig.from_pretrained(models / family)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    shutil.copytree(models / family, folder)
    (model.base_model if headless else model).save_pretrained(folder, max_shard_size=max_shard_size)
    return folder
