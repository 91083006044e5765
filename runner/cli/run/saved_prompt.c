/* SPDX-License-Identifier: Apache-2.0 */

/* Prompts from files and to files; see the header. */

#include "run.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "common/clock.h"
#include "common/files.h"
#include "prune_file.h"

/* A note ends with the window that a pruner observed, and with this, which no id is, plus how many
 * of its ids the sequence lacks. */
#define NOTE_HELD    0x80000000u
/* Tokens of a block, at most. */
#define BLOCK_TOKENS 64u

/* As the file says it: family, depth and weights; then config.json, which older files do not say.
 * @return bytes in front of that */
static size_t name_model(const cli_run *run, char name[64])
{
    cli_model_print print;
    cli_model_print_make(&run->model, run->weights, &print);
    return (size_t)snprintf(name, 64, "%.24s %ux%u %s %s", print.family, print.layers,
                            print.hidden_size, print.weights, print.settings) -
           sizeof print.settings;
}

/* Keys and hidden states of a prompt follow from weights and from config.json. */
static kvf_status check_model(const cli_run *run, const kvf_saved *saved, kvf_error *error)
{
    const char *path = run->options.load_file;
    char name[64];
    const size_t weights = name_model(run, name);
    const bool are_same = strncmp(name, saved->model, weights) == 0;
    if (strcmp(name, saved->model) == 0 || (are_same && saved->model[weights] == '\0'))
        return KVF_OK;
    if (are_same && saved->model[weights] == ' ')
        return model_fail(error, KVF_INVALID,
                          "--load %s was saved with another config.json of this model, such as "
                          "another RoPE; load it with that, or save the prompt again",
                          path);
    return model_fail(error, KVF_INVALID,
                      "--load %s is of model '%s', this one is '%s'; load that model, or save "
                      "the prompt again",
                      path, saved->model, name);
}

/* The note of a file that this model wrote: ids, and how many at the end wait to be fed. */
static kvf_status take_note(cli_run *run, const kvf_saved *saved, kvf_error *error)
{
    const char *path = run->options.load_file;
    kvf_token_ids *ids = &run->loaded.prompt;
    KVF_TRY(check_model(run, saved, error));
    uint32_t held = 0;
    if (ids->count >= 2 && ids->ids[ids->count - 1] >= NOTE_HELD) {
        held = ids->ids[--ids->count] - NOTE_HELD;
        run->options.cache.observe_window = ids->ids[--ids->count];
    }
    if (saved->note_bytes % sizeof *ids->ids || held >= ids->count)
        return model_fail(error, KVF_INVALID,
                          "--load %s has no token ids; use a file that kvferry run --save wrote",
                          path);
    run->loaded.tokens = (uint32_t)ids->count - held;
    return cli_check_ids(&run->model, ids, error);
}

kvf_status cli_saved_read(cli_run *run, kvf_error *error)
{
    const char *path = run->options.load_file;
    kvf_saved saved;
    if (!path)
        return KVF_OK;
    KVF_TRY(
        cli_runtime_open(&run->options.runtime, &run->model, run->weights, &run->runtime, error));
    KVF_TRY(kvf_saved_read(run->runtime, path, 0, &saved, NULL, 0, error));
    for (size_t i = 0; i < saved.note_bytes / sizeof(uint32_t); i++)
        KVF_TRY(kvf_token_ids_push(&run->loaded.prompt, 0, error));
    KVF_TRY(kvf_saved_read(run->runtime, path, 0, &saved, run->loaded.prompt.ids,
                           run->loaded.prompt.count * sizeof(uint32_t), error));
    return take_note(run, &saved, error);
}

kvf_status cli_saved_match(cli_run *run, kvf_error *error)
{
    const char *path = run->options.load_file;
    const uint32_t *ids = run->loaded.prompt.ids;
    if (!path)
        return KVF_OK;
    if (run->prompt.count == 0) {
        KVF_TRY(kvf_token_ids_append(&run->prompt, ids, run->loaded.prompt.count, error));
        if (run->loaded.tokens < run->loaded.prompt.count || run->options.ask_file)
            return KVF_OK;
        return model_fail(error, KVF_INVALID,
                          "--load %s holds all tokens of a prompt that was pruned, and nothing is "
                          "left to go on from; give a longer prompt, or --ask",
                          path);
    }
    if (run->loaded.tokens >= run->prompt.count)
        return model_fail(error, KVF_INVALID,
                          "--load %s holds %u tokens and the prompt has %zu; the prompt must begin "
                          "with them and go on",
                          path, run->loaded.tokens, run->prompt.count);
    for (uint32_t i = 0; i < run->loaded.tokens; i++)
        if (ids[i] != run->prompt.ids[i])
            return model_fail(error, KVF_INVALID,
                              "--load %s is of another prompt: token %u is %u there and %u here; "
                              "the prompt must begin with all %u tokens of the file",
                              path, i, ids[i], run->prompt.ids[i], run->loaded.tokens);
    return KVF_OK;
}

/* The least that the file will have: ids, and keys and values of 4 bits where pages are quantized.
 * How much pruning or a mask leaves is not known yet. */
static uint64_t least_bytes(const cli_run *run)
{
    const kvf_cache_config *c = &run->options.cache;
    const uint64_t tokens = run->prompt.count > 0 ? run->prompt.count - 1 : 0;
    const uint64_t elements = 2 * tokens * c->layers * c->kv_heads * c->head_dim;
    const uint64_t ids = tokens * sizeof(uint32_t);
    if (run->options.prune.policy || c->head_mask)
        return ids;
    return ids +
           (c->pages == KVF_PAGES_NATIVE ? elements * kvf_dtype_bytes(c->dtype) : elements / 2);
}

/* Does to the target what saving will do to it, up to its name. */
static kvf_status try_target(const char *path, uint64_t bytes, kvf_error *error)
{
    char place[PATH_MAX], beside[KVF_BESIDE_BYTES];
    const char *what;
    const int file = kvf_open_beside(path, ".tmp-", place, beside, &what);
    if (file < 0)
        return model_fail_errno(error, errno, "--save %s: %s", path, what);
    const int code = bytes > kvf_file_bytes_max()                        ? EFBIG
                     : bytes && fallocate(file, 0, 0, (off_t)bytes) != 0 ? errno
                                                                         : 0;
    (void)close(file);
    (void)unlink(beside);
    return code == ENOSPC || code == EDQUOT || code == EFBIG
               ? model_fail_errno(error, code, "--save %s: there is no room for %llu bytes", path,
                                  (unsigned long long)bytes)
               : KVF_OK;
}

/* Refusals that would otherwise come only after the prefill. */
static kvf_status check_target(const cli_run *run, kvf_error *error)
{
    const char *path = run->options.save_file;
    kvf_saved unused;
    struct stat info;
    if (kvf_saved_read(run->runtime, "/dev/null", 0, &unused, NULL, 0, error) == KVF_UNSUPPORTED)
        return KVF_UNSUPPORTED;
    if (stat(path, &info) == 0 && !S_ISREG(info.st_mode))
        return model_fail(error, KVF_INVALID, "--save %s is %s; name a new file, or a regular one",
                          path, S_ISDIR(info.st_mode) ? "a folder" : "no regular file");
    return try_target(path, least_bytes(run), error);
}

kvf_status cli_saved_check(const cli_run *run, kvf_error *error)
{
    if (!run->options.save_file)
        return KVF_OK;
    if (run->prompt.count == 1 && !run->options.prune.policy)
        return model_fail(error, KVF_INVALID,
                          "--save %s: the prompt has 1 token, and a file lacks the last one; give "
                          "a longer prompt",
                          run->options.save_file);
    return check_target(run, error);
}

uint64_t cli_saved_room(const cli_run *run)
{
    return run->loaded.tokens
               ? (uint64_t)run->loaded.tokens + run->options.cache.local_tokens + BLOCK_TOKENS
               : 0;
}

kvf_status cli_saved_load(cli_run *run, kvf_error *error)
{
    kvf_restore_args args;
    if (!run->options.load_file)
        return KVF_OK;
    kvf_restore_args_init(&args);
    args.path = run->options.load_file;
    args.exact = !run->options.reselect;
    kvf_sequence_destroy(run->sequence);
    run->sequence = NULL;
    const double start = kvf_now_ms();
    const kvf_status status = kvf_sequence_restore(run->cache, &args, run->stream, &run->sequence);
    run->loaded.ms = kvf_now_ms() - start;
    if (status == KVF_OK)
        return KVF_OK;
    const char *why = kvf_runtime_error(run->runtime)->text;
    return model_fail(error, status, "--load: %s%s", why,
                      strstr(why, "exact = 0") ? ", which is --reselect here" : "");
}

/* The library copies the note. */
static kvf_status save_with(cli_run *run, const char *name, kvf_token_ids *note, kvf_error *error)
{
    const uint32_t held = (uint32_t)run->prompt.count - run->loaded.tokens - run->prefilled;
    kvf_save_args args;
    KVF_TRY(kvf_token_ids_append(note, run->prompt.ids, run->prompt.count, error));
    KVF_TRY(kvf_token_ids_push(note, run->options.cache.observe_window, error));
    KVF_TRY(kvf_token_ids_push(note, NOTE_HELD + held, error));
    kvf_save_args_init(&args);
    args.sequence = run->sequence;
    args.path = run->options.save_file;
    args.model = name;
    args.note = note->ids;
    args.note_bytes = (uint32_t)(note->count * sizeof *note->ids);
    const kvf_status status = kvf_sequence_save(run->cache, &args, run->stream, &run->save);
    return status == KVF_OK
               ? KVF_OK
               : model_fail(error, status, "--save: %s", kvf_runtime_error(run->runtime)->text);
}

kvf_status cli_saved_begin(cli_run *run, kvf_error *error)
{
    kvf_token_ids note = {0};
    char name[64];
    if (!run->options.save_file)
        return KVF_OK;
    (void)name_model(run, name);
    const kvf_status status = save_with(run, name, &note, error);
    kvf_token_ids_free(&note);
    return status;
}

bool cli_saved_end(cli_run *run)
{
    kvf_error error;
    if (!run->save)
        return true;
    const kvf_status status = kvf_save_finish(run->save, &error);
    run->save = NULL;
    if (status != KVF_OK)
        fprintf(stderr, "kvferry: --save: %s\n", error.text);
    return status == KVF_OK;
}
