# SPDX-License-Identifier: Apache-2.0
"""Tiny random models of every architecture that the installed Transformers knows for text.

A configuration is shrunk by the names of its fields, inner configurations included; `OWN` has what a
family needs besides. Its layers are of all kinds that the files of the family name, as released ones have
kinds that defaults do not. Weights are large enough that attention shows in the logits: `make` gives every
matrix a gain of its own, because weights as Transformers draws them attend to all tokens alike.
"""
import dataclasses
import glob
import os
import re
import sys
import types

import torch
import transformers

VOCABULARY = 320
FIRST, LAST = 5, 280  # token ids of prompts; those above are of images, sounds and the like
LAYERS = 4
GAIN = 1.6

# A field of a configuration gets this value where it has that name.
SIZES = {
    128: "hidden_size d_model n_embd dim_model embedding_size input_embedding_size output_embedding_size"
         " word_embed_proj_dim emb_dim lru_width hidden_size_global attention_hidden_size adapter_out_dim"
         " out_hidden_size projection_dim backbone_hidden_size",
    96: "intermediate_size ffn_dim decoder_ffn_dim encoder_ffn_dim moe_intermediate_size d_ff dff"
        " shared_expert_intermediate_size ffn_hidden_size dim_ff intermediate_size_mlp"
        " expert_ffn_hidden_size shared_intermediate_size dense_intermediate_size d_inner"
        " feed_forward_size shared_experts_intermediate_size moe_shared_expert_intermediate_size n_inner",
    LAYERS: "num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers"
            " num_decoder_layers num_encoder_layers num_blocks depth num_experts num_local_experts"
            " n_routed_experts moe_num_experts num_attention_heads n_head n_heads num_heads"
            " decoder_attention_heads encoder_attention_heads attention_heads"
            " num_encoder_attention_heads num_decoder_attention_heads swa_num_attention_heads"
            " linear_num_value_heads linear_num_heads index_n_heads conf_num_hidden_layers",
    2: "num_key_value_heads num_kv_heads linear_num_key_heads num_experts_per_tok moe_topk moe_k"
       " swa_num_key_value_heads",
    32: "head_dim v_head_dim qk_nope_head_dim linear_key_head_dim linear_value_head_dim kv_channels"
        " swa_head_dim attention_head_dim dim_head d_kv d_head index_head_dim linear_head_dim"
        " attention_head_size",
    16: "qk_rope_head_dim kv_lora_rank q_lora_rank rotary_dim mamba_d_state state_size ssm_state_size"
        " hidden_size_per_layer_input laurel_rank patch_size o_lora_rank",
    48: "qk_head_dim",
    VOCABULARY: "vocab_size vocab_size_per_layer_input decoder_vocab_size unpadded_vocab_size",
    64: "sliding_window attention_window_size local_attention sliding_window_size window_size"
        " keep_window_size attention_chunk_size image_size",
    4096: "max_position_embeddings n_positions n_ctx max_seq_len max_target_positions context_length",
    0: "pad_token_id",
    1: "bos_token_id n_group num_nextn_predict_layers topk_group",
}
BY_NAME = {name: size for size, names in SIZES.items() for name in names.split()}

# Fields whose value None means something else than "derive it" to no family.
EVEN_NONE = ("head_dim", "num_key_value_heads", "num_experts_per_tok", "n_routed_experts", "n_group",
             "topk_group")
# In families with latent keys a head has its own keys, and head_dim is the part that turns.
LATENT = {"num_key_value_heads": LAYERS, "head_dim": 16}

PARTIAL = ("sliding_attention", "linear_attention", "chunked_attention", "conv", "minimax_m3_sparse")
_MIXED = ["linear_attention", "full_attention"] * 2
# Fields that a family needs besides, by its class of configurations.
OWN = {
    "BambaConfig": {"attn_layer_indices": [1, 3], "mamba_n_heads": 8, "mamba_d_head": 32},
    "BailingHybridConfig": {"layer_types": _MIXED},
    "BltConfig": {"encoder_hash_byte_group_vocab": 100},
    "ChameleonConfig": {"vocabulary_map": {"<image>": 300}},
    "CohereCompassTextConfig": {"rope_parameters": {
        kind: {"rope_type": "default", "rope_theta": 1e4} for kind in ("full_attention", "sliding_attention")}},
    "Data2VecTextConfig": {"pad_token_id": 1},
    "DbrxAttentionConfig": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8},
    "Dots1Config": {"n_shared_experts": 1},
    "DoryConfig": {"n_input_layers": 1, "n_output_layers": 1},
    "Emu3Config": {"vocabulary_map": {"<image>": 300}},
    "GPTNeoConfig": {"attention_types": [[["global", "local"], 2]]},
    "Gemma3nTextConfig": {"num_kv_shared_layers": 2, "activation_sparsity_pattern": [0.0] * LAYERS},
    "GraniteMoeHybridConfig": {"layer_types": _MIXED, "mamba_n_heads": 8, "mamba_d_head": 32},
    "JambaConfig": {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_dt_rank": 16},
    "KimiLinearConfig": {"layer_types": _MIXED},
    "Lfm2MoeConfig": {"layer_types": ["conv", "full_attention"] * 2},
    "Mamba2Config": {"num_heads": 8},
    "Qwen4ExpTextConfig": {"indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 32,
                           "indexer_budget": 64, "indexer_compress_ratio": 4},
    "ReformerConfig": {"axial_pos_embds_dim": [32, 96], "axial_pos_shape": [64, 64]},
    "XmodConfig": {"default_language": "en_XX"},
    "ZambaConfig": {"layers_block_type": ["linear_attention", "hybrid"] * 2, "mamba_dt_rank": 16},
    "Zamba2Config": {"layers_block_type": ["linear_attention", "hybrid"] * 2},
    "ZayaConfig": {"num_experts_per_tok": 1},
}
# Sections of a head that turn by time, height and width.
OWN.update((name + "Config", {"rope_parameters": {
    "rope_type": "default", "rope_theta": 1e4, "mrope_section": sections, **more}})
    for name, sections, more in (
        ("Qwen2VLText", [8, 4, 4], {}), ("Qwen2_5_VLText", [8, 4, 4], {}),
        ("PaddleOCRText", [8, 4, 4], {}), ("Glm4vText", [4, 6, 6], {}), ("GlmOcrText", [4, 6, 6], {}),
        ("Glm4vMoeText", [2, 3, 3], {"partial_rotary_factor": 0.5}),
        ("Ernie4_5_VLMoeText", [4, 4, 8], {}), ("Cosmos3EdgeText", [6, 5, 5], {})))


# More settings of a family that change its attention: name -> (class, fields of its configuration).
VARIANTS = {
    "GPT2LMHeadModel with scale_attn_by_inverse_layer_idx": (
        "GPT2LMHeadModel", {"scale_attn_by_inverse_layer_idx": True}),
    "GPTBigCodeForCausalLM with n_head = 48": (
        "GPTBigCodeForCausalLM", {"n_head": 48, "n_embd": 48 * 16}),
    "Gemma4ForCausalLM with num_kv_shared_layers": ("Gemma4ForCausalLM", {"num_kv_shared_layers": 2}),
    "Gemma4ForConditionalGeneration with num_kv_shared_layers": (
        "Gemma4ForConditionalGeneration", {"text_config.num_kv_shared_layers": 2}),
    "Gemma4UnifiedForConditionalGeneration with num_kv_shared_layers": (
        "Gemma4UnifiedForConditionalGeneration", {"text_config.num_kv_shared_layers": 2}),
    "Gemma3nForCausalLM with num_kv_shared_layers = 0": (
        "Gemma3nForCausalLM", {"num_kv_shared_layers": 0}),
    "FalconForCausalLM with alibi": ("FalconForCausalLM", {"alibi": True}),
    "FalconForCausalLM with num_attention_heads = 24": (
        "FalconForCausalLM", {"num_attention_heads": 24, "hidden_size": 24 * 32}),
    "FalconForCausalLM with new_decoder_architecture": (
        "FalconForCausalLM", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "MistralForCausalLM with sliding_window = None": ("MistralForCausalLM", {"sliding_window": None}),
    "Phi3ForCausalLM with sliding_window = None": ("Phi3ForCausalLM", {"sliding_window": None}),
    "DeepseekV3ForCausalLM with v_head_dim = 16": ("DeepseekV3ForCausalLM", {"v_head_dim": 16}),
    "MiMoV2FlashForCausalLM with head_dim = 64": ("MiMoV2FlashForCausalLM", {"head_dim": 64}),
    "Gemma2ForCausalLM with attn_logit_softcapping = None": (
        "Gemma2ForCausalLM", {"attn_logit_softcapping": None}),
}
# Classes that do not run here as tiny models of text, by the reason.
NOT_TINY = {name: reason for reason, names in {
    "they generate from a picture, sound or a layout, not from text alone":
        "BlipForConditionalGeneration Blip2ForConditionalGeneration InstructBlipForConditionalGeneration"
        " InstructBlipVideoForConditionalGeneration IdeficsForVisionText2Text"
        " Kosmos2ForConditionalGeneration PPFormulaNetForConditionalGeneration"
        " Pix2StructForConditionalGeneration UdopForConditionalGeneration VisionEncoderDecoderModel"
        " VoxtralRealtimeForConditionalGeneration MusicgenForCausalLM MusicgenMelodyForCausalLM",
    "they draft for another model, or do not write token after token":
        "Gemma4AssistantForCausalLM Gemma4UnifiedAssistantForCausalLM DiffusionGemmaForBlockDiffusion"
        " PI0ForConditionalGeneration",
    "they need a package that the environment has not (Pillow and timm, SciPy)":
        "FastVlmForConditionalGeneration Gemma3nForConditionalGeneration"
        " PerceptionLMForConditionalGeneration InklingForConditionalGeneration",
    "they fail without kvferry, or answer otherwise in every run":
        "ReformerModelWithLMHead Llama4ForConditionalGeneration BltForCausalLM Qwen2_5OmniThinkerForConditionalGeneration"
        " Qwen3OmniMoeThinkerForConditionalGeneration EncoderDecoderModel",
    "parts of their configuration depend on each other in ways that tiny_models.py does not know":
        "DeepseekOcr2ForConditionalGeneration Dots3NoteForConditionalGeneration"
        " Glm5NextForConditionalGeneration Granite4VisionForConditionalGeneration"
        " HunYuanVLForConditionalGeneration Inkling2ForConditionalGeneration"
        " HYV4VLForConditionalGeneration Inkling2LoopForConditionalGeneration"
        " Apertus1p5ForConditionalGeneration"
        " Molmo2ForConditionalGeneration Nemotron3_5TranscribeForConditionalGeneration"
        " NemotronH_Omni_Reasoning_V3 Step3p7ForConditionalGeneration"
        " UnlimitedOcrForConditionalGeneration",
}.items() for name in names.split()}


def make(name, seed):
    """The tiny model of a class, or of a row of VARIANTS."""
    name, fields = VARIANTS.get(name, (name, {}))
    kind = getattr(transformers, name)
    torch.manual_seed(seed)
    model = fill(kind(_shrunk(kind.config_class, **fields)), seed).eval()
    if model.config.is_encoder_decoder and model.generation_config.decoder_start_token_id is None:
        model.generation_config.decoder_start_token_id = 1
    return model


def _shrunk(kind, **own):
    """An instance of a class of configurations; own: fields that stay as they are, "inner.field" too."""
    given: dict = {}
    fields = {field.name: field for field in dataclasses.fields(kind) if field.init}
    place = LAST + 1
    for name, field in fields.items():
        if name in BY_NAME and (isinstance(field.default, int) or name in EVEN_NONE):
            given[name] = BY_NAME[name]
        elif name.endswith(("_token_id", "_token_index")) and isinstance(field.default, int):
            given[name], place = place, place + 1
    given.update({"eos_token_id": 2} if "eos_token_id" in fields else {})
    given.update({"is_decoder": True} if "is_decoder" in fields else {})
    if "qk_rope_head_dim" in fields:
        given.update((name, value) for name, value in LATENT.items() if name in fields)
    given.update(OWN.get(kind.__name__, {}))
    given.update((name, value) for name, value in own.items() if "." not in name)
    for name, inner in vars(_default(kind)).items():
        if isinstance(inner, transformers.PretrainedConfig) and name in fields and name not in given:
            given[name] = _shrunk(type(inner), **{field[len(name) + 1:]: value for field, value in own.items()
                                                  if field.startswith(name + ".")})
    made = kind(**given)
    kinds = getattr(made, "layer_types", None)
    if "layer_types" in fields and "layer_types" not in given and kinds:
        others = [other for other in PARTIAL if other in {*kinds, *_kinds_named(kind)}]
        if others and set(kinds) <= {*PARTIAL, "full_attention"}: # all of them, whatever the pattern
            given["layer_types"] = [others[at // 2 % len(others)] if at % 2 == 0 else "full_attention"
                                    for at in range(len(kinds))]
            if "sliding_attention" in others:
                given.update((name, value) for name, value in (("sliding_window", 64), ("use_sliding_window", True))
                             if name in fields)
            made = kind(**given)
    rope = getattr(made, "rope_parameters", None)
    if isinstance(rope, dict) and "mrope_section" in rope and "rope_parameters" not in given:
        whole = int(made.head_dim // 2 * rope.get("partial_rotary_factor", 1))
        third = whole * 3 // 8
        given["rope_parameters"] = dict(rope, mrope_section=[whole - 2 * third, third, third])
        made = kind(**given)
    return made


def _kinds_named(kind):
    """Kinds of layers that the files of a family name in its own words."""
    folder, text = os.path.dirname(sys.modules[kind.__module__].__file__), ""
    for path in sorted(glob.glob(os.path.join(folder, "*.py"))):
        if os.path.basename(path).startswith(("modeling_", "configuration_")):
            with open(path, encoding="utf-8") as source:
                text += source.read()
    named = set(re.findall(r'"(\w+)"', text))
    return named if "full_attention" in named else set()


def _default(kind):
    try:
        return kind()
    except Exception: # needs arguments: OWN gives them
        return types.SimpleNamespace()


def fill(model, seed=5):
    """Fill a model with random weights."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if not weight.is_floating_point():
                continue
            draw = torch.randn(weight.shape, generator=generator)
            if weight.ndim >= 2:
                embeds = "embed" in name or "wte" in name
                weight.copy_(draw * (1 if embeds else GAIN / weight.shape[-1] ** 0.5))
            elif "sink" in name:
                weight.copy_(1 + draw)
            elif not bool(weight.any()):
                weight.copy_(0.1 * draw)
    return model
