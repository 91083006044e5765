#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Engines of vLLM for tests: the models, the prompts, and a process that answers them.

Every engine is a process of its own: this file, with a job to read. It writes what came of it beside it.
Knows what an engine is asked, and not what it should answer.
"""
import functools
import json
import os
import subprocess
import sys
import tempfile

VOCABULARY = 160
LENGTHS = (1, 2, 31, 32, 33, 64, 100, 150, 200, 257, 400, 511)
NEW = 24
FULL = 2048
LIMIT = 900 # seconds for an engine, on a machine that does other things
FOLDER = tempfile.TemporaryDirectory(prefix="kvferry-vllm-")
COMPILED = {"enforce_eager": False, "compilation_config": {"mode": 2, "backend": "eager"}}
# Random models, but for what makes them what they are.
SHAPE = {"vocab_size": VOCABULARY, "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 4,
         "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32, "max_position_embeddings": FULL,
         "pad_token_id": 0, "eos_token_id": None, "bos_token_id": 1}
PER_KIND = {"attention_backend": None, "attention_config": {"backend_per_kind": {"full_attention": "CUSTOM"}}}
DRAFTS = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3,
          "prompt_lookup_min": 1}


def saved(model, name):
    """The folder of a model."""
    folder = os.path.join(FOLDER.name, name)
    model.save_pretrained(folder)
    return folder


def drawn(name, kind, is_sharp=False, **fields):
    """The folder of a random model of a class; is_sharp: attention shows in its tokens."""
    import torch
    import transformers
    import tiny_models
    torch.manual_seed(7)
    kind = getattr(transformers, kind)
    model = kind(kind.config_class(**fields))
    if is_sharp:
        tiny_models.fill(model, 7)
        with torch.no_grad():
            model.model.embed_tokens.weight.mul_(1 / 64) # or a token is followed by itself, whatever attention says
    return saved(model, name)


@functools.lru_cache(maxsize=None)
def small_model():
    """A random Llama."""
    return drawn("small", "LlamaForCausalLM", **SHAPE)


def variant(name, **fields):
    """The small model as something else, without weights."""
    folder = os.path.join(FOLDER.name, name)
    os.makedirs(folder, exist_ok=True)
    with open(os.path.join(small_model(), "config.json"), encoding="utf-8") as text:
        config = json.load(text)
    with open(os.path.join(folder, "config.json"), "w", encoding="utf-8") as out:
        json.dump({**config, **fields}, out)
    return folder


def windowed_model(windows=3):
    """A random Gemma 3: of every four layers so many see 64 tokens."""
    return drawn("windowed%d" % windows, "Gemma3ForCausalLM", **{
        **SHAPE, "num_hidden_layers": 8, "query_pre_attn_scalar": 32, "sliding_window": 64,
        "layer_types": (["sliding_attention"] * windows + ["full_attention"] * (4 - windows)) * 2})


def capped_model(cap):
    """A random Gemma 2: a cap on logits, and every other layer sees 64 tokens."""
    return drawn("capped%s" % cap, "Gemma2ForCausalLM", True, **SHAPE, query_pre_attn_scalar=32, sliding_window=64,
                 attn_logit_softcapping=cap)


def adapters(count):
    """Folders of LoRA adapters of the small model, each of rank 8 on queries, keys and values, large enough to be
    seen in its tokens."""
    import torch
    from safetensors.torch import save_file
    rows = {"q_proj": 256, "k_proj": 128, "v_proj": 128}
    folders = [os.path.join(FOLDER.name, "adapter%d" % i) for i in range(count)]
    for seed, folder in enumerate(folders):
        os.makedirs(folder, exist_ok=True)
        generator = torch.Generator().manual_seed(70 + seed)
        named = "base_model.model.model.layers.%d.self_attn.%s.lora_%s.weight"
        weights = {named % (layer, name, half): torch.randn(shape, generator=generator) * 0.1
                   for layer in range(4) for name, out in rows.items() for half, shape in (("A", (8, 256)), ("B", (out, 8)))}
        save_file(weights, os.path.join(folder, "adapter_model.safetensors"))
        with open(os.path.join(folder, "adapter_config.json"), "w", encoding="utf-8") as out:
            json.dump({"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 8, "lora_alpha": 16, "lora_dropout": 0.0,
                       "bias": "none", "target_modules": list(rows)}, out)
    return folders


def looped_model():
    """The small model as an IQuest LoopCoder: its layers come twice, and then attend to keys of the first time as well,
    beside 64 tokens of their own."""
    import torch
    from safetensors.torch import load_file, save_file
    folder = variant("looped", architectures=["IQuestLoopCoderForCausalLM"], loop_num=2, loop_window_size=64)
    weights = load_file(os.path.join(small_model(), "model.safetensors"))
    generator = torch.Generator().manual_seed(7)
    for layer in range(4): # gates: of each head one number per query
        for name, shape in (("weight", (8, 32)), ("bias", (8,))):
            weights["model.gate_projections.%d.%s" % (layer, name)] = torch.randn(shape, generator=generator)
    save_file(weights, os.path.join(folder, "model.safetensors"), {"format": "pt"})
    return folder


def sinks_model():
    """A random gpt-oss."""
    import tiny_models
    return saved(tiny_models.make("GptOssForCausalLM", 7), "sinks")


def drafting_model():
    """A random Ernie 4.5, whose checkpoints have a layer for drafts."""
    import tiny_models
    model = tiny_models.make("Ernie4_5_MoeForCausalLM", 7)
    model.config.num_nextn_predict_layers = 1
    return saved(model, "drafting")


def pictured_model():
    """A random Gemma 3 for images, with words of one token."""
    import tokenizers
    import transformers
    import tiny_models
    model = tiny_models.make("Gemma3ForConditionalGeneration", 7)
    folder, config = saved(model, "pictured"), model.config
    words = {"\n" * (i - 3) if 4 <= i < 8 else "w%d" % i: i for i in range(tiny_models.VOCABULARY)}
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w3")), unk_token="w3",
        pad_token="w0", bos_token="w1", eos_token="w2", extra_special_tokens={
            name + "_token": "w%d" % number for name, number in (
                ("boi", config.boi_token_index), ("eoi", config.eoi_token_index), ("image", config.image_token_id))})
    transformers.Gemma3Processor(
        image_processor=transformers.Gemma3ImageProcessor(size={"height": 64, "width": 64}), tokenizer=tokenizer,
        image_seq_length=config.mm_tokens_per_image).save_pretrained(folder)
    return folder


def linear_model():
    """A random Granite 4: of every four layers three are Mamba."""
    shape = {name: value for name, value in SHAPE.items() if name != "head_dim"}
    return drawn("linear", "GraniteMoeHybridForCausalLM", True, **{
        **shape, "num_hidden_layers": 8, "position_embedding_type": "rope", "mamba_n_heads": 8, "mamba_d_head": 64,
        "mamba_d_state": 16, "mamba_n_groups": 1, "num_local_experts": 0, "shared_intermediate_size": 256,
        "layer_types": (["mamba"] * 3 + ["attention"]) * 2})


def name_fields(config):
    """Name fields of MiMo-V2 as its checkpoints do: vLLM reads these, Transformers writes its own."""
    if config.model_type == "mimo_v2_flash":
        full, windows = (config.rope_parameters[kind] for kind in ("full_attention", "sliding_attention"))
        for name, value in {
                "hybrid_layer_pattern": [int(kind == "sliding_attention") for kind in config.layer_types],
                "moe_layer_freq": [int(kind == "sparse") for kind in config.mlp_layer_types],
                "swa_num_attention_heads": config.num_attention_heads,
                "swa_num_key_value_heads": 2 * config.num_key_value_heads, "swa_head_dim": config.head_dim,
                "swa_v_head_dim": config.v_head_dim, "sliding_window_size": config.sliding_window,
                "add_swa_attention_sink_bias": True, "layernorm_epsilon": config.rms_norm_eps,
                "partial_rotary_factor": full["partial_rotary_factor"], "rope_theta": full["rope_theta"],
                "swa_rope_theta": windows["rope_theta"]}.items():
            setattr(config, name, value)


def narrow_model(values, kinds=("sliding_attention", "full_attention")):
    """A random MiMo-V2 with keys of 64 elements, its folder and the model of Transformers."""
    import tiny_models
    tiny_models.VARIANTS["narrow"] = "MiMoV2FlashForCausalLM", {
        "head_dim": 64, "v_head_dim": values, "layer_types": list(kinds) * 2}
    model = tiny_models.make("narrow", 7)
    name_fields(model.config)
    return saved(model, "narrow %d of %s" % (values, "_".join(kinds))), model


def mamba_model():
    """A Mamba, without weights."""
    import transformers
    return saved(transformers.MambaConfig(architectures=["MambaForCausalLM"], vocab_size=VOCABULARY, hidden_size=256,
                                          num_hidden_layers=2, pad_token_id=0, eos_token_id=None, bos_token_id=1), "mamba")


def poisoned_model(token):
    """The small model with an embedding that is not a number."""
    from safetensors.torch import load_file, save_file
    folder = variant("poisoned")
    weights = load_file(os.path.join(small_model(), "model.safetensors"))
    weights["model.embed_tokens.weight"][token] = float("nan")
    save_file(weights, os.path.join(folder, "model.safetensors"), {"format": "pt"})
    return folder


def prompts():
    import torch
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(2, VOCABULARY, (n,), generator=generator).tolist() for n in LENGTHS]


# ---- an engine: a process that reads what to do, and writes what came of it ----

def counters(llm):
    return {m.name: m.value for m in llm.get_metrics() if hasattr(m, "value")}


def of_metrics(prefix):
    """Values of /metrics of this process by name and labels."""
    from prometheus_client import generate_latest
    rows = [line.rsplit(" ", 1) for line in generate_latest().decode().splitlines()]
    return {name: float(value) for name, value in rows if name.startswith(prefix)}


def sampling(**fields):
    from vllm import SamplingParams
    return SamplingParams(**{"temperature": 0, "max_tokens": NEW, "ignore_eos": True,
                             "detokenize": False, **fields})


def do_answer(llm, ids, lengths=(NEW,), priority=None, **fields):
    """Tokens of every prompt, and how many of them came from the prefix cache. Answers have `lengths` in turn."""
    asked = [sampling(**{"max_tokens": lengths[i % len(lengths)], **fields}) for i in range(len(ids))]
    made = llm.generate([{"prompt_token_ids": i} for i in ids], asked, use_tqdm=False, priority=priority)
    return {"tokens": [[list(answer.token_ids) for answer in one.outputs] for one in made],
            "cached": [one.num_cached_tokens for one in made]}


def do_adapt(llm, ids, folders):
    """The same prompts under no adapter and under each, all at once."""
    from vllm.lora.request import LoRARequest
    under = [None, *(LoRARequest(os.path.basename(f), i + 1, f) for i, f in enumerate(folders))]
    made = llm.generate([{"prompt_token_ids": i} for _ in under for i in ids], [sampling() for _ in under for _ in ids],
                        use_tqdm=False, lora_request=[one for one in under for _ in ids])
    return {"tokens": [list(one.outputs[0].token_ids) for one in made],
            "cached": [one.num_cached_tokens for one in made]}


def do_poison(llm, good, bad, last):
    """Two requests that must be lost among others: one by its prompt, one by its first answer."""
    ids = [*good, bad, good[0]]
    fields = [{} for _ in good] + [{}, {"allowed_token_ids": [last]}]
    made = llm.generate([{"prompt_token_ids": i} for i in ids], [sampling(**f) for f in fields],
                        use_tqdm=False)
    return {"tokens": [[list(answer.token_ids) for answer in one.outputs] for one in made]}


def do_abort(llm, ids, every):
    """Requests that come and go: every so many are dropped while they run. Tokens of the others."""
    engine, done = llm.llm_engine, {}
    for number, prompt in enumerate(ids):
        engine.add_request(str(number), {"prompt_token_ids": prompt}, sampling())
    passes = 0
    while engine.has_unfinished_requests():
        for one in engine.step():
            if one.finished:
                done[int(one.request_id)] = list(one.outputs[0].token_ids)
        passes += 1
        if passes % 3 == 0:
            engine.abort_request([str(passes // 3 * every)])
    return {"tokens": [done.get(number) for number in range(len(ids))]}


def do_reset(llm):
    """Forget all prompts."""
    return {"done": llm.reset_prefix_cache()}


def do_reload(llm):
    """Read the weights anew, as after training."""
    llm.collective_rpc("reload_weights")


def do_new_sinks(llm):
    """Other attention sinks in place, as whoever trains sends them: weights as the engine has them."""
    import torch
    runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    new = [(name, 3 - weight.detach()) for name, weight in runner.model.named_parameters() if name.endswith("sinks")]
    with torch.no_grad():
        runner.reload_weights(weights_iterator=iter(new), is_checkpoint_format=False)
    return len(new)


def do_sleep(llm, level, tags=(None,)):
    """Sleep and wake up, in so many steps. MiB of memory in no file before, while it sleeps, and after."""
    def held():
        with open("/proc/self/status", encoding="ascii") as text:
            return sum(int(line.split()[1]) for line in text if line.startswith(("RssAnon", "RssShmem"))) // 1024
    told = [held()]
    llm.sleep(level=level)
    told.append(held())
    for each in tags:
        llm.wake_up(each)
    return [*told, held()]


class Replayed:
    """A CUDA graph as a CPU has it: the call that was captured, with the addresses that it had then."""

    count = 0

    def __init__(self, call):
        self.call = call

    def replay(self):
        from vllm.config import CUDAGraphMode
        Replayed.count += 1
        self.call(CUDAGraphMode.NONE)


def do_graphs(llm, sizes):
    """From now on passes of steps are replayed, as vLLM's second runner does it on a GPU: with its choice of
    graphs, its padding up to one of `sizes`, and what a pass had when it was captured. Returns its mode."""
    import torch
    from vllm.config import CUDAGraphMode, set_current_vllm_config
    from vllm.platforms import current_platform
    from vllm.v1.worker.gpu import attn_utils, cudagraph_utils
    runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner

    def capture(self, create_forward_fn, *_, **__):
        for desc in self._capture_descs[CUDAGraphMode.FULL]:
            create_forward_fn(desc, warmup=True)(CUDAGraphMode.NONE)
            self.graphs[desc] = Replayed(create_forward_fn(desc, warmup=False))
            self.graphs[desc].replay()
        self._graphs_captured = True

    type(current_platform)._global_graph_pool = object()
    cudagraph_utils.CudaGraphManager.capture = capture
    config = runner.compilation_config
    config.cudagraph_mode = CUDAGraphMode.FULL_DECODE_ONLY
    config.cudagraph_capture_sizes, config.max_cudagraph_capture_size = sizes, max(sizes, default=0)
    told = attn_utils.get_attn_cg_support(runner.attn_groups, runner.vllm_config)
    mode = config.resolve_cudagraph_mode_and_sizes(
        told.min_cg_support, told.min_cg_attn_backend, runner.decode_query_len, use_v2_model_runner=True,
        kv_cache_config=runner.kv_cache_config, max_num_reqs=runner.max_num_reqs)
    runner.cudagraph_manager = cudagraph_utils.ModelCudaGraphManager(
        runner.vllm_config, runner.device, mode, decode_query_len=runner.decode_query_len)
    with set_current_vllm_config(runner.vllm_config), torch.inference_mode():
        if runner.cudagraph_manager.needs_capture():
            runner.cudagraph_manager.capture(
                runner.model, runner.model_state, runner.input_buffers, runner.intermediate_tensors,
                runner.block_tables, runner.attn_groups, runner.kv_cache_config)
    Replayed.count = 0
    return mode.name


def do_replays(_):
    """How many passes were."""
    return Replayed.count


def refused(settings):
    """Why an engine does not start."""
    from vllm import LLM
    try:
        LLM(**settings)
    except Exception as error: # pylint: disable=broad-exception-caught
        return str(error)
    return "it starts"


def take_second_runner():
    """vLLM's second model runner, the first choice on GPUs. Triton interprets its kernels, and thinks that it
    has a driver."""
    import types
    import triton.backends
    import torch
    driver = type("Driver", (), {"is_active": staticmethod(lambda: True)})
    triton.backends.backends["cpu"] = types.SimpleNamespace(driver=driver, compiler=None)
    torch.set_num_threads(1)


def engine_main(path):
    with open(path, encoding="utf-8") as text:
        job = json.load(text)
    if os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1":
        take_second_runner()
    from vllm import LLM
    from vllm.model_executor.models import registry
    registry._run_in_subprocess = lambda inspect: inspect() # else a process for each class that was not seen yet
    told = {"refused": [refused(settings) for settings in job["refused"]]}
    if job["calls"]:
        llm = LLM(**job["engine"])
        told["results"] = [globals()["do_" + name](llm, *given, **named)
                           for name, given, named in job["calls"]]
        told["counters"], told["ours"] = counters(llm), of_metrics("kvferry:")
        llm.llm_engine.engine_core.shutdown()
    with open(path + ".out", "w", encoding="utf-8") as out:
        json.dump(told, out)


def settings_of(ours, **changes):
    settings = {"model": small_model(), "enforce_eager": True, "dtype": "float32", "block_size": 32,
                "num_gpu_blocks_override": 301, "skip_tokenizer_init": True, "max_num_seqs": 12,
                "max_num_batched_tokens": 2048, "max_model_len": FULL, "seed": 0,
                "gpu_memory_utilization": 0.1, "disable_log_stats": False}
    if ours is not None:
        settings.update(attention_backend="CUSTOM", additional_config={"kvferry": ours})
    settings.update(changes)
    return settings


def environment(several=False, second=False):
    env = dict(os.environ, HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", VLLM_PLUGINS="kvferry",
               TMPDIR=FOLDER.name, VLLM_ENABLE_V1_MULTIPROCESSING="1" if several else "0", OMP_WAIT_POLICY="passive")
    if several:
        env["VLLM_CPU_OMP_THREADS_BIND"] = "0|1"
    if second:
        env.update(TRITON_INTERPRET="1", VLLM_USE_V2_MODEL_RUNNER="1", OMP_NUM_THREADS="1",
                   VLLM_CPU_OMP_THREADS_BIND="nobind")
    return env


class Engine:
    """The answers of an engine, why others did not start, and the log."""

    def __init__(self, calls, ours=None, several=False, refused=(), second=False, **changes): # pylint: disable=redefined-outer-name
        handle, path = tempfile.mkstemp(dir=FOLDER.name)
        with os.fdopen(handle, "w") as out:
            json.dump({"engine": settings_of(ours, **changes), "calls": calls,
                       "refused": [settings_of({"budget": FULL}, **one) for one in refused]}, out)
        done = subprocess.run([sys.executable, os.path.abspath(__file__), path],
                              env=environment(several, second), stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT, text=True, timeout=LIMIT)
        self.log, self.rc = done.stdout, done.returncode
        told = {}
        if os.path.exists(path + ".out"):
            with open(path + ".out", encoding="utf-8") as text:
                told = json.load(text)
        self.results, self.counters = told.get("results", []), told.get("counters", {})
        self.refused, self.ours = told.get("refused", []), told.get("ours", {})

    @property
    def tokens(self):
        """Answers of all calls that have some."""
        return [one["tokens"] for one in self.results]

    def summed(self, name):
        """One of our counters, over ranks."""
        return sum(value for full, value in self.ours.items()
                   if full.startswith("kvferry:%s_total{" % name))


def answer(ids, **fields):
    return ("answer", [ids], fields)


def beginnings():
    """Three prompts that begin alike, as none of `prompts` does."""
    import torch
    generator = torch.Generator().manual_seed(4)
    ids = torch.randint(2, VOCABULARY, (330,), generator=generator).tolist()
    return [ids[:300] + ids[300 + 10 * i:310 + 10 * i] for i in range(3)]


def three_answers():
    """Drawn from a seed. In one pass: vLLM cannot draw so between chunks on a CPU."""
    return answer(prompts()[9:10], n=3, temperature=1.0, seed=5)


if __name__ == "__main__":
    engine_main(sys.argv[1])
