/* SPDX-License-Identifier: Apache-2.0 */

/* Prompts from files and to files; see the header. */

#include "saved_prompt.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "common/clock.h"
#include "prune_file.h"

/* As the file says it: family, depth and weights. */
static void name_model(const cli_run *run, char name[64])
{
    cli_model_print print;
    cli_model_print_make(&run->model, run->weights, &print);
    snprintf(name, 64, "%.24s %ux%u %s", print.family, print.layers, print.hidden_size,
             print.weights);
}

/* The ids that a file holds, freed with free. */
static kvf_status read_ids(cli_run *run, kvf_saved *saved, uint32_t **ids, kvf_error *error)
{
    const char *path = run->options.load_file;
    KVF_TRY(kvf_saved_read(run->runtime, path, 0, saved, NULL, 0, error));
    *ids = malloc((size_t)saved->note_bytes + 1);
    if (!*ids)
        return model_out_of_memory(error, saved->note_bytes, "the ids of a saved prompt");
    return kvf_saved_read(run->runtime, path, 0, saved, *ids, saved->note_bytes, error);
}

static kvf_status compare(const cli_run *run, const kvf_saved *saved, const uint32_t *ids,
                          kvf_error *error)
{
    const char *path = run->options.load_file;
    const uint32_t count = saved->note_bytes / sizeof *ids;
    char name[64];
    name_model(run, name);
    if (strcmp(name, saved->model) != 0)
        return model_fail(error, KVF_INVALID,
                          "--load %s is of model '%s', this one is '%s'; load that model, or save "
                          "the prompt again",
                          path, saved->model, name);
    if (count == 0 || saved->note_bytes % sizeof *ids)
        return model_fail(error, KVF_INVALID,
                          "--load %s has no token ids; use a file that kvferry run --save wrote",
                          path);
    if (count >= run->prompt.count)
        return model_fail(error, KVF_INVALID,
                          "--load %s holds %u tokens and the prompt has %zu; the prompt must begin "
                          "with them and go on",
                          path, count, run->prompt.count);
    for (uint32_t i = 0; i < count; i++)
        if (ids[i] != run->prompt.ids[i])
            return model_fail(error, KVF_INVALID,
                              "--load %s is of another prompt: token %u is %u there and %u here; "
                              "the prompt must begin with all %u tokens of the file",
                              path, i, ids[i], run->prompt.ids[i], count);
    return KVF_OK;
}

/* What would be said only after the prefill otherwise: the build, and the folder. */
static kvf_status check_target(const cli_run *run, kvf_error *error)
{
    const char *path = run->options.save_file;
    const char *slash = strrchr(path, '/');
    kvf_saved unused;
    char folder[4096] = ".";
    if (kvf_saved_read(run->runtime, "/dev/null", 0, &unused, NULL, 0, error) == KVF_UNSUPPORTED)
        return KVF_UNSUPPORTED;
    if (slash)
        snprintf(folder, sizeof folder, "%.*s", slash == path ? 1 : (int)(slash - path), path);
    if (access(folder, W_OK | X_OK) != 0)
        return model_fail(error, KVF_SYSTEM, "--save %s: folder %.200s: %s", path, folder,
                          strerror(errno));
    return KVF_OK;
}

kvf_status cli_saved_check(cli_run *run, kvf_error *error)
{
    kvf_saved saved;
    uint32_t *ids = NULL;
    if (run->options.save_file)
        KVF_TRY(check_target(run, error));
    if (!run->options.load_file)
        return KVF_OK;
    kvf_status status = read_ids(run, &saved, &ids, error);
    if (status == KVF_OK)
        status = compare(run, &saved, ids, error);
    if (status == KVF_OK)
        run->loaded = saved.note_bytes / (uint32_t)sizeof *ids;
    free(ids);
    return status;
}

kvf_status cli_saved_load(cli_run *run, kvf_error *error)
{
    kvf_restore_args args;
    if (!run->options.load_file)
        return KVF_OK;
    kvf_restore_args_init(&args);
    args.path = run->options.load_file;
    kvf_sequence_destroy(run->sequence);
    run->sequence = NULL;
    const double start = kvf_now_ms();
    const kvf_status status = kvf_sequence_restore(run->cache, &args, run->stream, &run->sequence);
    run->restore_ms = kvf_now_ms() - start;
    return status == KVF_OK
               ? KVF_OK
               : model_fail(error, status, "--load: %s", kvf_runtime_error(run->runtime)->text);
}

kvf_status cli_saved_begin(cli_run *run, kvf_error *error)
{
    kvf_save_args args;
    char name[64];
    if (!run->options.save_file)
        return KVF_OK;
    name_model(run, name);
    kvf_save_args_init(&args);
    args.sequence = run->sequence;
    args.path = run->options.save_file;
    args.model = name;
    args.note = run->prompt.ids;
    args.note_bytes = (uint32_t)((run->loaded + run->prefilled) * sizeof *run->prompt.ids);
    const kvf_status status = kvf_sequence_save(run->cache, &args, run->stream, &run->save);
    return status == KVF_OK
               ? KVF_OK
               : model_fail(error, status, "--save: %s", kvf_runtime_error(run->runtime)->text);
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
