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
static size_t name_model(const cli_input *in, char name[64])
{
    cli_model_print print;
    cli_model_print_make(&in->model, in->weights, &print);
    return (size_t)snprintf(name, 64, "%.24s %ux%u %s %s", print.family, print.layers,
                            print.hidden_size, print.weights, print.settings) -
           sizeof print.settings;
}

/* Keys and hidden states of a prompt follow from weights and from config.json. */
static kvf_status check_model(const cli_input *in, const kvf_saved *saved, kvf_error *error)
{
    const char *path = in->options.load_file;
    char name[64];
    const size_t weights = name_model(in, name);
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
static kvf_status take_note(cli_input *in, cli_machine *m, const kvf_saved *saved, kvf_error *error)
{
    const char *path = in->options.load_file;
    kvf_token_ids *ids = &in->loaded.prompt;
    KVF_TRY(check_model(in, saved, error));
    uint32_t held = 0;
    if (ids->count >= 2 && ids->ids[ids->count - 1] >= NOTE_HELD) {
        held = ids->ids[--ids->count] - NOTE_HELD;
        m->config.observe_window = ids->ids[--ids->count];
    }
    if (saved->note_bytes % sizeof *ids->ids || held >= ids->count)
        return model_fail(error, KVF_INVALID,
                          "--load %s has no token ids; use a file that kvferry run --save wrote",
                          path);
    in->loaded.tokens = (uint32_t)ids->count - held;
    return cli_check_ids(&in->model, ids, error);
}

kvf_status cli_saved_read(cli_input *in, cli_machine *m, kvf_error *error)
{
    const char *path = in->options.load_file;
    kvf_saved saved;
    if (!path)
        return KVF_OK;
    KVF_TRY(kvf_runtime_open(&in->options.runtime, &m->runtime, error));
    KVF_TRY(kvf_saved_read(m->runtime, path, 0, &saved, NULL, 0, error));
    for (size_t i = 0; i < saved.note_bytes / sizeof(uint32_t); i++)
        KVF_TRY(kvf_token_ids_push(&in->loaded.prompt, 0, error));
    KVF_TRY(kvf_saved_read(m->runtime, path, 0, &saved, in->loaded.prompt.ids,
                           in->loaded.prompt.count * sizeof(uint32_t), error));
    return take_note(in, m, &saved, error);
}

kvf_status cli_saved_match(cli_input *in, kvf_error *error)
{
    const char *path = in->options.load_file;
    const uint32_t *ids = in->loaded.prompt.ids;
    if (!path)
        return KVF_OK;
    if (in->prompt.count == 0) {
        KVF_TRY(kvf_token_ids_append(&in->prompt, ids, in->loaded.prompt.count, error));
        if (in->loaded.tokens < in->loaded.prompt.count || in->options.ask_file)
            return KVF_OK;
        return model_fail(error, KVF_INVALID,
                          "--load %s holds all tokens of a prompt that was pruned, and no token is "
                          "left to continue from; give a longer prompt, or --ask",
                          path);
    }
    if (in->loaded.tokens >= in->prompt.count)
        return model_fail(error, KVF_INVALID,
                          "--load %s holds %u tokens and the prompt has %zu; the prompt must begin "
                          "with them and be longer",
                          path, in->loaded.tokens, in->prompt.count);
    for (uint32_t i = 0; i < in->loaded.tokens; i++)
        if (ids[i] != in->prompt.ids[i])
            return model_fail(error, KVF_INVALID,
                              "--load %s is of another prompt: token %u is %u there and %u here; "
                              "the prompt must begin with all %u tokens of the file",
                              path, i, ids[i], in->prompt.ids[i], in->loaded.tokens);
    return KVF_OK;
}

/* The least that the file will have: ids, and keys and values of 4 bits where pages are quantized.
 * How much pruning or a mask leaves is not known yet. */
static uint64_t least_bytes(const cli_input *in, const cli_machine *m)
{
    const kvf_cache_config *c = &m->config;
    const uint64_t tokens = in->prompt.count > 0 ? in->prompt.count - 1 : 0;
    const uint64_t elements = 2 * tokens * c->layers * c->kv_heads * c->head_dim;
    const uint64_t ids = tokens * sizeof(uint32_t);
    if (in->options.prune.policy || c->head_mask)
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
static kvf_status check_target(const cli_input *in, const cli_machine *m, kvf_error *error)
{
    const char *path = in->options.save_file;
    kvf_saved unused;
    struct stat info;
    if (kvf_saved_read(m->runtime, "/dev/null", 0, &unused, NULL, 0, error) == KVF_UNSUPPORTED)
        return KVF_UNSUPPORTED;
    if (stat(path, &info) == 0 && !S_ISREG(info.st_mode))
        return model_fail(error, KVF_INVALID, "--save %s is %s; name a new file, or a regular one",
                          path, S_ISDIR(info.st_mode) ? "a folder" : "no regular file");
    return try_target(path, least_bytes(in, m), error);
}

kvf_status cli_saved_check(const cli_input *in, const cli_machine *m, kvf_error *error)
{
    if (!in->options.save_file)
        return KVF_OK;
    if (in->prompt.count == 1 && !in->options.prune.policy)
        return model_fail(error, KVF_INVALID,
                          "--save %s: the prompt has 1 token, and a file lacks the last one; give "
                          "a longer prompt",
                          in->options.save_file);
    return check_target(in, m, error);
}

uint64_t cli_saved_room(const cli_input *in, const cli_machine *m)
{
    return in->loaded.tokens ? (uint64_t)in->loaded.tokens + m->config.local_tokens + BLOCK_TOKENS
                             : 0;
}

kvf_status cli_saved_load(cli_run *run, kvf_error *error)
{
    kvf_restore_args args;
    if (!run->in->options.load_file)
        return KVF_OK;
    kvf_restore_args_init(&args);
    args.path = run->in->options.load_file;
    args.exact = !run->in->options.reselect;
    kvf_sequence_destroy(run->sequence);
    run->sequence = NULL;
    const double start = kvf_now_ms();
    const kvf_status status =
        kvf_sequence_restore(run->machine->cache, &args, run->machine->stream, &run->sequence);
    run->restore_ms = kvf_now_ms() - start;
    if (status == KVF_OK)
        return KVF_OK;
    const char *why = kvf_runtime_error(run->machine->runtime)->text;
    return model_fail(error, status, "--load: %s%s", why,
                      strstr(why, "exact = 0") ? ", which is --reselect here" : "");
}

/* The library copies the note. */
static kvf_status save_with(cli_run *run, const char *name, kvf_token_ids *note, kvf_error *error)
{
    const uint32_t held = (uint32_t)run->in->prompt.count - run->in->loaded.tokens - run->prefilled;
    kvf_save_args args;
    KVF_TRY(kvf_token_ids_append(note, run->in->prompt.ids, run->in->prompt.count, error));
    KVF_TRY(kvf_token_ids_push(note, run->machine->config.observe_window, error));
    KVF_TRY(kvf_token_ids_push(note, NOTE_HELD + held, error));
    kvf_save_args_init(&args);
    args.sequence = run->sequence;
    args.path = run->in->options.save_file;
    args.model = name;
    args.note = note->ids;
    args.note_bytes = (uint32_t)(note->count * sizeof *note->ids);
    const kvf_status status =
        kvf_sequence_save(run->machine->cache, &args, run->machine->stream, &run->save);
    return status == KVF_OK ? KVF_OK
                            : model_fail(error, status, "--save: %s",
                                         kvf_runtime_error(run->machine->runtime)->text);
}

kvf_status cli_saved_begin(cli_run *run, kvf_error *error)
{
    kvf_token_ids note = {0};
    char name[64];
    if (!run->in->options.save_file)
        return KVF_OK;
    (void)name_model(run->in, name);
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
