/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Opens and closes what benchmarks of the runner need; see bench_model.h.
 */

#include "bench_model.h"

#include "random_model.h"

#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

static bool write_random(bench_model *m, const char *config)
{
    const char *base = getenv("TMPDIR");
    snprintf(m->directory, sizeof m->directory, "%s/kvf-bench-XXXXXX", base ? base : "/tmp");
    if (mkdtemp(m->directory))
        return random_model_write(m->directory, config);
    perror(m->directory);
    m->directory[0] = '\0';
    return false;
}

static kvf_status open_all(bench_model *m, const char *path, kvf_transformer_options *options,
                           kvf_cache_config *cache, kvf_error *error)
{
    kvf_runtime_config rc;
    kvf_runtime_config_init(&rc);
    rc.device = KVF_DEVICE_HOST; /* buffers of the benchmarks are host memory */
    rc.allow_unpinned = 1;
    KVF_TRY(kvf_runtime_open(&rc, &m->runtime, error));
    KVF_TRY(kvf_stream_create(m->runtime, &m->stream));
    KVF_TRY(kvf_model_config_read(path, NULL, &m->config, error));
    KVF_TRY(kvf_weights_open(path, NULL, &m->weights, error));
    kvf_model_config_fit(&m->config, m->weights);
    options->model = &m->config;
    options->runtime = m->runtime;
    options->weights = m->weights;
    KVF_TRY(kvf_transformer_open(options, &m->transformer, error));
    kvf_transformer_geometry(options, cache);
    return kvf_transformer_cache_open(m->transformer, cache, &m->cache, error);
}

bool bench_model_open(bench_model *m, const char *path, const char *random_config, uint32_t chunk,
                      uint32_t prompt, kvf_cache_config *cache)
{
    kvf_error error = {0};
    kvf_transformer_options options = {.chunk_max = chunk, .prompt_max = prompt, .batch_max = 1};
    if (!path && !write_random(m, random_config))
        return false;
    const kvf_status status = open_all(m, path ? path : m->directory, &options, cache, &error);
    if (status != KVF_OK)
        fprintf(stderr, "%s %s\n", kvf_status_name(status), error.text);
    return status == KVF_OK;
}

void bench_model_close(bench_model *m)
{
    static const char *const files[] = {"config.json", "model.safetensors"};
    kvf_cache_close(m->cache);
    kvf_transformer_close(m->transformer);
    kvf_stream_destroy(m->stream);
    kvf_runtime_close(m->runtime);
    kvf_weights_close(m->weights);
    for (size_t i = 0; m->directory[0] && i < sizeof files / sizeof *files; i++) {
        char path[640];
        snprintf(path, sizeof path, "%s/%s", m->directory, files[i]);
        unlink(path);
    }
    if (m->directory[0])
        rmdir(m->directory);
}

kvf_status bench_model_wait(bench_model *m, kvf_status status)
{
    const kvf_status waited = kvf_stream_wait(m->stream);
    return status == KVF_OK ? waited : status;
}
