# SPDX-License-Identifier: Apache-2.0
"""GGUF files with random weights of families that llama.cpp runs, made by its own converter.

usage: llama_models.py SOURCE FOLDER [NAME...]     (under a Python with torch and Transformers)

SOURCE is llama.cpp's tree. A file that is there stays. Weights are fp32, so that rounding in products does
not hide attention. They have no tokenizer: a test feeds ids. Configurations are small, with heads as wide as
those of real models.
"""
import json
import os
import shutil
import sys
import tempfile

VOCABULARY = 320
COMMON = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4,
          "num_key_value_heads": 2, "head_dim": 64, "vocab_size": VOCABULARY, "max_position_embeddings": 4096,
          "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False}
LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 64,
          "linear_value_head_dim": 64, "layer_types": ["linear_attention", "full_attention"] * 2}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
# Name of the file -> (class of Transformers, fields besides COMMON; None takes one out).
FAMILIES = {
    "llama": ("LlamaForCausalLM", {}),
    "mistral": ("MistralForCausalLM", {"head_dim": 128, "sliding_window": None}),
    "qwen3": ("Qwen3ForCausalLM", {"head_dim": 128}),
    "qwen3moe": ("Qwen3MoeForCausalLM", {"head_dim": 128, "decoder_sparse_step": 1, **EXPERTS}),
    "qwen35": ("Qwen3_5ForCausalLM", {"head_dim": 128, **LINEAR}),
    "qwen35moe": ("Qwen3_5MoeForCausalLM", {"head_dim": 128, "shared_expert_intermediate_size": 128, **LINEAR,
                                            **EXPERTS}),
    "gemma3": ("Gemma3ForCausalLM", {"num_hidden_layers": 6, "head_dim": 128, "sliding_window": 64,
                                     "query_pre_attn_scalar": 128, "tie_word_embeddings": True,
                                     "layer_types": ["sliding_attention"] * 5 + ["full_attention"]}),
    "gemma4": ("Gemma4ForCausalLM", {"head_dim": 64, "global_head_dim": 128, "sliding_window": 64,
                                     "tie_word_embeddings": True, "num_kv_shared_layers": 0,
                                     "vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 64,
                                     "layer_types": ["sliding_attention", "full_attention"] * 2}),
    "gptoss": ("GptOssForCausalLM", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 64,
                                     "layer_types": ["sliding_attention", "full_attention"] * 2}),
    "glm4moe": ("Glm4MoeForCausalLM", {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1,
                                       "moe_intermediate_size": 128, "first_k_dense_replace": 1, "n_group": 1,
                                       "topk_group": 1, "head_dim": 128, "use_qk_norm": True}),
    "phi": ("Phi3ForCausalLM", {"head_dim": None, "sliding_window": None}),
    "granite": ("GraniteMoeHybridForCausalLM", {
        "head_dim": None, "mamba_n_heads": 8, "mamba_d_head": 64, "mamba_d_state": 64, "mamba_expand": 2,
        "mamba_n_groups": 1, "num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 128,
        "layer_types": ["mamba", "attention"] * 2, "position_embedding_type": "rope"}),
    "deepseek": ("DeepseekV3ForCausalLM", {
        "head_dim": None, "num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1,
        "topk_group": 1, "first_k_dense_replace": 1, "moe_intermediate_size": 128, "q_lora_rank": 64,
        "kv_lora_rank": 128, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64}),
}


def random_model(name):
    """A model of Transformers with random weights; those of tiny_models.py, in fp32."""
    import torch
    import transformers

    import tiny_models
    kind, own = FAMILIES[name]
    kind = getattr(transformers, kind)
    fields = {field: value for field, value in {**COMMON, **own}.items() if value is not None or field in own}
    fields = {field: value for field, value in fields.items() if not (value is None and field == "head_dim")}
    model = tiny_models.fill(kind(kind.config_class(**fields)), 1)
    if fields["tie_word_embeddings"]: # logits of embeddings as large as those of a real model, not one token alone
        with torch.no_grad():
            model.get_input_embeddings().weight.mul_(0.1)
    return model


def rename_layers(path):
    """Hybrids of Mamba call their layers as the converter knows them; Transformers renames them when it saves."""
    with open(path, encoding="utf-8") as text:
        config = json.load(text)
    if config["model_type"] == "granitemoehybrid":
        config["layer_types"] = [{"full_attention": "attention", "linear_attention": "mamba"}.get(kind, kind)
                                 for kind in config["layer_types"]]
        with open(path, "w", encoding="utf-8") as out:
            json.dump(config, out)


def convert(source, folder, path):
    """llama.cpp's converter, told that there is no tokenizer."""
    import pathlib

    import torch
    sys.path[:0] = [source, os.path.join(source, "gguf-py")]
    import gguf
    import conversion
    rename_layers(os.path.join(folder, "config.json"))
    hparams = conversion.ModelBase.load_hparams(pathlib.Path(folder), False)
    kind = conversion.get_model_class(conversion.get_model_architecture(hparams, conversion.ModelType.TEXT))

    def no_vocabulary(self):
        self.gguf_writer.add_tokenizer_model("none")
        self.gguf_writer.add_vocab_size(VOCABULARY)
    kind.set_vocab = no_vocabulary
    kind.no_mtp = True # layers that draft: there are none
    with open(os.path.join(folder, "tokenizer.json"), "w", encoding="utf-8") as out: # some count its tokens
        json.dump({"model": {"vocab": dict.fromkeys(map(str, range(VOCABULARY)))}, "added_tokens": []}, out)
    with torch.inference_mode():
        kind(pathlib.Path(folder), gguf.LlamaFileType.ALL_F32, pathlib.Path(path)).write()


def main():
    source, folder, *names = sys.argv[1:]
    os.makedirs(folder, exist_ok=True)
    failed = 0
    for name in names or FAMILIES:
        path = os.path.join(folder, name + ".gguf")
        if os.path.exists(path):
            continue
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            try:
                random_model(name).save_pretrained(scratch)
                convert(source, scratch, path + ".part")
            except Exception as error: # the other files are made all the same
                print("llama_models.py: %s: %s: %s" % (name, type(error).__name__, error), file=sys.stderr)
                failed = 1
                continue
        shutil.move(path + ".part", path)
    sys.exit(failed)


if __name__ == "__main__":
    main()
