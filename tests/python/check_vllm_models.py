#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Which families of models kvferry serves in vLLM, which way, and why others are refused.

A tiny random model of each is asked by vLLM alone and with kvferry, whose budget is the whole context: tokens
are equal and logarithms of probabilities are close, or the model is refused by name. Advice of a refusal is
followed, and leads to tokens or to `take another model`, never to another advice that was there before.
docs/vllm.md has the outcomes in a table, which this test compares and --write makes anew.

usage: check_vllm_models.py [--write] [--shard I/N] [CLASS...]     ./dev vllm runs it
"""
import argparse
import collections
import gc
import json
import math
import os
import re
import subprocess
import sys
import tempfile

import kvferry
import vllm_engine

PAGE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "docs", "vllm.md")
BEGIN, END = "<!-- models: check_vllm_models.py --write -->", "<!-- end of models -->"
FAMILIES = """
    ApertusForCausalLM ArceeForCausalLM BloomForCausalLM Cohere2ForCausalLM Cohere2MoeForCausalLM
    CohereForCausalLM CwmForCausalLM DeepseekV2ForCausalLM DeepseekV3ForCausalLM Ernie4_5ForCausalLM
    Ernie4_5_MoeForCausalLM Exaone4ForCausalLM ExaoneMoeForCausalLM FalconForCausalLM FalconH1ForCausalLM
    FlexOlmoForCausalLM GPT2LMHeadModel GPTBigCodeForCausalLM GPTJForCausalLM GPTNeoXForCausalLM
    Gemma2ForCausalLM Gemma3ForCausalLM Gemma3nForCausalLM Gemma4ForCausalLM GemmaForCausalLM
    Glm4ForCausalLM GlmForCausalLM GptOssForCausalLM GraniteForCausalLM GraniteMoeForCausalLM
    GraniteMoeHybridForCausalLM GraniteMoeSharedForCausalLM HunYuanDenseV1ForCausalLM HunYuanMoEV1ForCausalLM Lfm2MoeForCausalLM
    Llama4ForCausalLM LlamaForCausalLM Mamba2ForCausalLM MiniCPM3ForCausalLM Ministral3ForCausalLM
    MiMoV2FlashForCausalLM MistralForCausalLM MixtralForCausalLM NemotronForCausalLM OPTForCausalLM Olmo2ForCausalLM
    Olmo3ForCausalLM OlmoForCausalLM OlmoeForCausalLM Phi3ForCausalLM PhiForCausalLM Qwen2ForCausalLM
    Qwen2MoeForCausalLM Qwen3ForCausalLM Qwen3MoeForCausalLM Qwen3NextForCausalLM Qwen3_5ForCausalLM
    Qwen3_5MoeForCausalLM SeedOssForCausalLM SmolLM3ForCausalLM StableLmForCausalLM Starcoder2ForCausalLM
    VaultGemmaForCausalLM""".split()
FAMILIES.append("FalconForCausalLM with num_attention_heads = 24") # of one KV head
FAMILIES.append("Gemma4ForCausalLM with num_kv_shared_layers") # as E2B and E4B have
HEAD = "| in vLLM 0.32, on a CPU | models |"
SEED, TOKENS = 11, 512
# In a process that has Triton interpret its kernels: answers take most of a minute.
INTERPRETS = os.environ.get("TRITON_INTERPRET") == "1"
NEW, ROUNDS = (3, 1) if INTERPRETS else (8, 2)
# So many tokens are compared at each place of an answer, from the likeliest. Where embeddings are tied a tiny
# model repeats itself, and the first of them hardly depends on attention; the others do.
LIKELIEST = 5
# How logarithms may differ, relatively and absolutely. Kernels that add in other orders differ by 4e-6 in fp32.
CLOSE = {"float32": 1e-4, "bfloat16": 5e-2}
CAP = 2.0 # of logits, where a family has one: as large as its own it would not show in a tiny model
LINEAR = {"linear_key_head_dim": 128, "linear_value_head_dim": 128} # what vLLM's kernels for CPUs take
OWN = dict.fromkeys(("Qwen3NextForCausalLM", "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM"), LINEAR)
# As they are released: the files know windows, which vLLM refuses or serves another way, and no release has any.
OWN.update(dict.fromkeys(("Qwen2ForCausalLM", "Qwen3ForCausalLM", "SmolLM3ForCausalLM"),
                         {"layer_types": ["full_attention"] * 4, "num_hidden_layers": 4}))
OWN["MiMoV2FlashForCausalLM"] = {"head_dim": 64} # with values of 32
# vLLM's attention for values narrower than keys is Triton's.
INTERPRETED = ("MiMoV2FlashForCausalLM",)
TOGETHER = 8 # families in a process
# Advice of refusals: words of it, settings, and words of the table.
ADVICE = (
    ("backend_per_kind", vllm_engine.PER_KIND,
     "by `backend_per_kind`, windows by vLLM"),
)
# Beginnings of prompts are found in steps of so many tokens, in blocks of any size.
PREFIXES, NO_PREFIXES = {"enable_prefix_caching": True, "prefix_match_unit": 32}, {"enable_prefix_caching": False}
BY_TRITON = "with Triton interpreted, without which vLLM alone does not run them"
VLLM_S_OWN = "with `--no-enable-prefix-caching`, without which vLLM alone has other answers as well"


# ---- a process that tries some ----

def prompts():
    import torch
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(5, 280, (n,), generator=generator).tolist() for n in (33, 90, 150)]


def answers_of(settings):
    """Answers of an engine, which is gone afterwards: per token (itself, {token: logarithm} of the likeliest). Prompts
    are asked in rounds; where there is a prefix cache, the second time they begin in it, unless blocks are as large
    as windows of other layers make them."""
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory
    llm = None
    try:
        llm = LLM(**settings)
        asked = vllm_engine.sampling(max_tokens=NEW, logprobs=LIKELIEST)
        made = [one for _ in range(ROUNDS)
                for one in llm.generate([{"prompt_token_ids": ids} for ids in prompts()], asked, use_tqdm=False)]
        is_cached = ROUNDS > 1 and settings["enable_prefix_caching"] and "attention_config" not in settings
        if is_cached and not made[-1].num_cached_tokens:
            raise RuntimeError("nothing came from the prefix cache")
        return [[(token, {other: one.logprob for other, one in likely.items()})
                 for token, likely in zip(one.outputs[0].token_ids, one.outputs[0].logprobs)] for one in made]
    finally:
        if llm is not None:
            llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()
        cleanup_dist_env_and_memory()


def are_alike(told, wanted, close):
    """Whether tokens are equal, and what both name of the likeliest is close."""
    return all(a == b and all(math.isclose(p, q[other], rel_tol=close, abs_tol=close)
                              for other, p in likely.items() if other in q)
               for one, other_one in zip(told, wanted) for (a, likely), (b, q) in zip(one, other_one))


def attempt(folder):
    """(outcome, words) of a model, in fp32; in bf16 where vLLM has its linear layers in nothing else."""
    found = attempt_in(folder, "float32")
    if "requires BF16" in found[1]:
        outcome, how = attempt_in(folder, "bfloat16")
        found = outcome, how + ", in bf16" if outcome == "right" else how
    return found


def attempt_in(folder, dtype):
    """(outcome, words) of a model in a type."""
    plain = {"model": folder, "enforce_eager": True, "dtype": dtype, "skip_tokenizer_init": True,
             "max_num_seqs": 4, "max_model_len": TOKENS, "max_num_batched_tokens": TOKENS,
             "num_gpu_blocks_override": 64, "gpu_memory_utilization": 0.1, "seed": 0, "block_size": 32}
    wanted, why, ways = None, "", []
    try:
        wanted = answers_of({**plain, **NO_PREFIXES})
    except Exception as error: # pylint: disable=broad-exception-caught
        why = str(error) # it may be refused all the same
    settings = {**plain, "attention_backend": "CUSTOM", "additional_config": {"kvferry": {"budget": TOKENS,
                                                                                         "host_memory": "2GiB"}}}
    while True:
        try:
            asked = {**settings, **{name: value for _, more, _ in ways for name, value in more.items()}}
            told = answers_of({**asked, **PREFIXES})
            if wanted is None:
                return "not tried", why
            how, close = ", ".join(["served", *(words for *_, words in ways),
                                    *([BY_TRITON] if INTERPRETS else [])]), CLOSE[dtype]
            if are_alike(told, wanted, close):
                return "right", how
            if (are_alike(told, answers_of({**plain, **PREFIXES}), close)
                    and are_alike(answers_of({**asked, **NO_PREFIXES}), wanted, close)):
                return "right", "%s, %s" % (how, VLLM_S_OWN)
            return "wrong", "%s, with other answers" % how
        except Exception as error: # pylint: disable=broad-exception-caught
            text = str(error)
            if not isinstance(error, kvferry.Error) and "kvferry" not in text:
                return ("not tried", why) if wanted is None else ("wrong", text)
        advised = [one for one in ADVICE if one[0] in text and one not in ways]
        if not advised:
            return ("wrong", "advised %s, then refused: %s" % (ways[-1][0], text)) if ways else ("refused", text)
        ways.append(advised[0])


def work(names):
    if INTERPRETS:
        vllm_engine.take_second_runner()
    import torch
    from vllm.model_executor.models import registry
    import tiny_models
    registry._run_in_subprocess = lambda inspect: inspect() # a process for each class takes longer than its answers
    tiny_models.VARIANTS.update((name, (name, fields)) for name, fields in OWN.items())
    for name in names:
        with tempfile.TemporaryDirectory(dir=vllm_engine.FOLDER.name) as folder:
            print("%s%s" % (MARK, json.dumps([name])), flush=True)
            try:
                model = tiny_models.make(name, SEED).to(torch.float32)
                if getattr(model.config, "attn_logit_softcapping", None):
                    model.config.attn_logit_softcapping = CAP
                vllm_engine.name_fields(model.config)
                model.save_pretrained(folder)
                found = attempt(folder)
            except Exception as error: # pylint: disable=broad-exception-caught
                found = "not tried", str(error)
            print("%s%s" % (MARK, json.dumps([name, *found])), flush=True)


# ---- all of them ----

MARK = "\n@@ "


def outcomes(names):
    """{name: (outcome, words)}; a family that ends its process is wrong, and the next ones have another."""
    found, left = {}, sorted(names, key=lambda name: name in INTERPRETED)
    while left:
        told, interpreted = {}, left[0] in INTERPRETED
        some = [name for name in left if (name in INTERPRETED) == interpreted][:TOGETHER]
        with subprocess.Popen([sys.executable, os.path.abspath(__file__), "--worker", *some],
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                              env=vllm_engine.environment(second=interpreted)) as process:
            for line in process.stdout:
                if line.startswith("@@ "):
                    name, *row = json.loads(line[3:])
                    told[name] = tuple(row) or ("wrong", "its process ended")
                    if row:
                        print("%-32s %s: %s" % (name, *row), flush=True)
        if not told:
            raise RuntimeError("no family was tried of %s" % left)
        found.update(told)
        left = [name for name in left if name not in told]
    return found


def words_of(outcome, text):
    """A cell of the table."""
    return "refused: " + text.replace("kvferry does not support ", "").split("\n")[0] if outcome == "refused" else text


def rows_of(found):
    """{short name: words} of those that were served or refused."""
    return {re.sub("ForCausalLM|LMHeadModel", "", name): words_of(outcome, text)
            for name, (outcome, text) in found.items() if outcome in ("right", "refused")}


def in_page():
    """{short name: words} of the table that is there."""
    with open(PAGE, encoding="utf-8") as page:
        text = page.read()
    found = {}
    for line in text.split(BEGIN)[1].split(END)[0].splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split(" | ")]
        if len(cells) == 2 and line != HEAD:
            found.update((name, cells[0]) for name in cells[1].split(", "))
    return found


def write(told):
    """Families that were not tried this time stay as they are."""
    rows = collections.defaultdict(list)
    for name, words in {**in_page(), **told}.items():
        rows[words].append(name)
    order = sorted(rows.items(), key=lambda row: (row[0].startswith("refused"), -len(row[1]), row[0]))
    with open(PAGE, encoding="utf-8") as page:
        before, rest = page.read().split(BEGIN)
    lines = [HEAD, "|---|---|"]
    lines += ["| %s | %s |" % (words, ", ".join(sorted(names, key=str.lower))) for words, names in order]
    with open(PAGE, "w", encoding="utf-8") as page:
        page.write("%s%s\n\n%s\n\n%s%s" % (before, BEGIN, "\n".join(lines), END, rest.split(END)[1]))


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--write", action="store_true", help="write the table of docs/vllm.md")
    parser.add_argument("--shard", default="1/1", help="I/N: every Nth family, from the Ith")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("names", nargs="*", metavar="CLASS")
    args = parser.parse_args()
    if args.worker:
        return work(args.names)
    shard, of = map(int, args.shard.split("/"))
    found = outcomes(args.names or FAMILIES[shard - 1::of])
    wrong = ["%s: %s: %s" % (name, *one) for name, one in found.items() if one[0] in ("wrong", "not tried")]
    told = rows_of(found)
    if args.write and not wrong:
        write(told)
    there = in_page()
    wrong += ["%s: the table says '%s', it is '%s'" % (name, there.get(name), words)
              for name, words in told.items() if there.get(name) != words]
    print("\n".join(wrong))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
