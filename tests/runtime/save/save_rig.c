/* SPDX-License-Identifier: Apache-2.0 */

/* The rig of saved sequences; see the header. Knows nothing of what a test wants to prove. */

#include "save_rig.h"

#include <dirent.h>
#include <sys/stat.h>
#include <unistd.h>

static char folder[64];

const char *save_folder(void)
{
    if (!folder[0]) { /* in memory where that is, since every save waits for the medium */
        strcpy(folder,
               access("/dev/shm", W_OK) == 0 ? "/dev/shm/kvf-save-XXXXXX" : "/tmp/kvf-save-XXXXXX");
        assert_non_null(mkdtemp(folder));
    }
    return folder;
}

const char *save_path(const char *name)
{
    static char paths[8][160];
    static uint32_t next;
    char *path = paths[next++ % 8];
    snprintf(path, sizeof paths[0], "%s/%s", save_folder(), name);
    return path;
}

uint32_t save_count_files(void)
{
    uint32_t count = 0;
    const struct dirent *entry;
    DIR *dir = opendir(save_folder());
    assert_non_null(dir);
    while ((entry = readdir(dir)))
        count += entry->d_name[0] != '.';
    closedir(dir);
    return count;
}

int save_remove_folder(void **state)
{
    const struct dirent *entry;
    DIR *dir = opendir(save_folder());
    assert_non_null(dir);
    while ((entry = readdir(dir)))
        if (entry->d_name[0] != '.')
            (void)unlink(save_path(entry->d_name));
    closedir(dir);
    assert_int_equal(rmdir(folder), 0);
    folder[0] = '\0';
    return 0;
}

char *save_read(const char *path, size_t *bytes)
{
    struct stat about;
    assert_int_equal(stat(path, &about), 0);
    *bytes = (size_t)about.st_size;
    char *data = malloc(*bytes);
    FILE *file = fopen(path, "rb");
    assert_non_null(data);
    assert_non_null(file);
    assert_int_equal(fread(data, 1, *bytes, file), *bytes);
    fclose(file);
    return data;
}

/* ---- settings ---- */

#define RINGS " streaming_sink=5 streaming_recent=21"

const save_case save_cases[] = {
    {"boxes, resident refresh", ""},
    {"codes", "digest=codes"},
    {"pages of 1", "digest=codes page_size=1 dtype=bf16"},
    {"pages of 64", "page_size=64 local_tokens=8 sub_digests=2 budget_tokens=224 tokens_max=1024"},
    {"dynamic", "digest=codes select=dynamic page_size=4 dtype=fp16"},
    {"exact refresh", "refresh=exact digest=cuboid-mean refresh_interval=7"},
    {"auto ratio", "static_ratio=auto refresh_interval=5"},
    {"static", "select=static refresh_interval=6"},
    {"gather, mean boxes", "transfer=gather digest=mean refresh_interval=5"},
    {"quest", "select=quest"},
    {"arkvale", "select=arkvale verify_interval=3"},
    {"streaming", "select=streaming observe_window=32"},
    {"head mask", "layers=3 refresh_interval=5 head_mask=101100" RINGS},
    /* As few segments as may be are scored by codes. */
    {"coarse heads beside others",
     "digest=codes select=dynamic budget_tokens=64 coarse_share=0 head_mask=2012" RINGS},
    {"coarse heads", "digest=codes budget_tokens=64 coarse_share=0 head_mask=1222" RINGS},
    {"windows of two lengths", "layers=3 head_mask=101100 streaming_sink=5 layer_windows=9,0,21"},
    {"all heads stream", "head_mask=0000 streaming_sink=8 streaming_recent=16"},
    {"int8", "pages=k8v8 digest=codes dtype=bf16"},
    {"int4, narrow values", "pages=k8v4 digest=codes select=dynamic page_size=4 dtype=bf16 "
                            "head_dim=192 value_dim=128"},
    {NULL, NULL},
};

kvf_cache_config save_config(const save_case *c)
{
    kvf_cache_config config = test_config_small();
    config.layers = 2;
    config.sequences_max = 3;
    config.digest = KVF_DIGEST_MINMAX;
    test_set(&config, c->settings);
    return config;
}

kvf_save_args save_args(kvf_sequence *s, const char *path, const char *model)
{
    kvf_save_args args;
    kvf_save_args_init(&args);
    args.sequence = s;
    args.path = path;
    args.model = model;
    return args;
}

kvf_save *save_begin(test_world *w, kvf_sequence *s, const char *path, const char *model)
{
    const kvf_save_args args = save_args(s, path, model);
    kvf_save *save = NULL;
    test_ok(w, kvf_sequence_save(w->cache, &args, w->stream, &save));
    return save;
}

kvf_status save_now(test_world *w, kvf_sequence *s, const char *path, kvf_error *error)
{
    return kvf_save_finish(save_begin(w, s, path, "test"), error);
}

kvf_sequence *save_restore(test_world *w, const char *path, uint32_t exact)
{
    kvf_restore_args args;
    kvf_sequence *s = NULL;
    kvf_restore_args_init(&args);
    args.path = path;
    args.model = "test";
    args.exact = exact;
    test_ok(w, kvf_sequence_restore(w->cache, &args, w->stream, &s));
    assert_non_null(s);
    return s;
}
