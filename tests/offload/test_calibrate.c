/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Calibration: it measures what there is within its time, its file comes back as it was and is
 * trusted only if it is whole and for this key, and the choice is the cheapest by the fits.
 */

#include "transfer_calibrate.h"

#include <math.h>
#include <sys/stat.h>
#include <unistd.h>

#include "offload_rig.h"

#define FILE_MAX 8192u

typedef struct folder {
    char path[64], file[96];
} folder;

static void make_folder(folder *f)
{
    snprintf(f->path, sizeof f->path, "/tmp/kvf-calibrate-XXXXXX");
    assert_non_null(mkdtemp(f->path));
    snprintf(f->file, sizeof f->file, "%s/costs", f->path);
}

/* Fails if anything but the file is left in it. */
static void remove_folder(folder *f)
{
    (void)unlink(f->file);
    assert_int_equal(rmdir(f->path), 0);
}

static size_t read_all(const char *path, char *text)
{
    FILE *file = fopen(path, "rb");
    assert_non_null(file);
    const size_t bytes = fread(text, 1, FILE_MAX, file);
    fclose(file);
    return bytes;
}

static void write_all(const char *path, const char *text, size_t bytes)
{
    FILE *file = fopen(path, "wb");
    assert_non_null(file);
    assert_int_equal(fwrite(text, 1, bytes, file), bytes);
    fclose(file);
}

static kvf_calibration example(const char *key, double scale)
{
    kvf_calibration c = {.is_measured = 1,
                         .page_bytes = 16384,
                         .peak_bytes_per_second = 53e9 * scale,
                         .extra_ns = 2500};
    snprintf(c.key, sizeof c.key, "%s", key);
    c.fit[KVF_TRANSFER_GATHER] = (kvf_calibration_fit){1, 20000 * scale, 0.0189, 0.999812};
    c.fit[KVF_TRANSFER_MAPPED] = (kvf_calibration_fit){1, -150, 0.0213, 0.98};
    c.fit[KVF_TRANSFER_EACH] = (kvf_calibration_fit){1, 5000, 0.12, 1};
    return c;
}

static void assert_same(const kvf_calibration *a, const kvf_calibration *b)
{
    assert_int_equal(a->page_bytes, b->page_bytes);
    assert_true(fabs(a->peak_bytes_per_second - b->peak_bytes_per_second) <= 0.5);
    assert_true(a->extra_ns == b->extra_ns);
    for (uint32_t m = 0; m < KVF_TRANSFER_METHODS; m++) {
        assert_int_equal(a->fit[m].is_measured, b->fit[m].is_measured);
        assert_true(fabs(a->fit[m].intercept_ns - b->fit[m].intercept_ns) <= 0.5);
        assert_true(fabs(a->fit[m].ns_per_byte - b->fit[m].ns_per_byte) <= 0.5e-6);
        assert_true(fabs(a->fit[m].r_squared - b->fit[m].r_squared) <= 0.5e-6);
    }
}

static int load(rig *r, const char *file, const char *key, kvf_calibration *out)
{
    *out = (kvf_calibration){.page_bytes = 16384};
    snprintf(out->key, sizeof out->key, "%s", key);
    return kvf_calibration_load(r->context, file, out);
}

RIG_TEST(test_round_trip)
{
    folder f;
    kvf_calibration a = example("one", 1), b = example("two", 2), read;
    make_folder(&f);
    assert_int_equal(load(r, f.file, "one", &read), 0);
    assert_string_equal(read.note, ""); /* no file yet is nothing to speak of */
    assert_int_equal(kvf_calibration_save(r->context, f.file, &a), 1);
    assert_int_equal(load(r, f.file, "one", &read), 1);
    assert_int_equal(read.is_cached, 1);
    assert_same(&read, &a);
    assert_int_equal(load(r, f.file, "two", &read), 0);
    assert_non_null(strstr(read.note, "another GPU"));
    assert_int_equal(read.is_measured, 0);
    /* Two machines share a home folder: neither loses its record. */
    assert_int_equal(kvf_calibration_save(r->context, f.file, &b), 1);
    a.extra_ns = 7;
    assert_int_equal(kvf_calibration_save(r->context, f.file, &a), 1);
    assert_int_equal(load(r, f.file, "one", &read), 1);
    assert_same(&read, &a);
    assert_int_equal(load(r, f.file, "two", &read), 1);
    assert_same(&read, &b);
    /* A folder is not replaced. */
    assert_int_equal(unlink(f.file), 0);
    assert_int_equal(mkfifo(f.file, 0600), 0);
    assert_int_equal(kvf_calibration_save(r->context, f.file, &a), 0);
    assert_non_null(strstr(a.note, "cannot be written: Invalid argument"));
    remove_folder(&f);
}

/* Whatever happens to one byte, or to the end of the file: the record is right or not there. */
RIG_TEST(test_damage)
{
    folder f;
    kvf_calibration a = example("GPU-1234/driver-13000", 1), read;
    char text[FILE_MAX], broken[FILE_MAX];
    make_folder(&f);
    assert_int_equal(kvf_calibration_save(r->context, f.file, &a), 1);
    const size_t bytes = read_all(f.file, text);
    for (size_t at = 0; at < bytes; at++) {
        write_all(f.file, text, at); /* cut short */
        assert_int_equal(load(r, f.file, a.key, &read), 0);
        assert_true(strlen(read.note) > 0);
        memcpy(broken, text, bytes);
        broken[at] ^= (char)(1 << at % 7);
        write_all(f.file, broken, bytes);
        assert_int_equal(load(r, f.file, a.key, &read), 0);
        assert_int_equal(read.is_measured, 0);
    }
    /* Saving over a damaged file mends it. */
    assert_int_equal(kvf_calibration_save(r->context, f.file, &a), 1);
    assert_int_equal(load(r, f.file, a.key, &read), 1);
    remove_folder(&f);
}

/* Right checksum, wrong content: what another version or a liar would write. */
RIG_TEST(test_strict)
{
    folder f;
    static const char too_fast[] = "kvferry-calibration 1\nkey k\npage_bytes 16384\n"
                                   "peak 9999999999999999\nextra 0\nfit each 1 2 3\n";
    static const char *const bodies[] = {
        "kvferry-calibration 2\nkey k\npage_bytes 16384\npeak 1\nextra 0\nfit each 1 2 3\n",
        "kvferry-calibration 1\nkey k\npage_bytes 4096\npeak 1\nextra 0\nfit each 1 2 3\n",
        "kvferry-calibration 1\nkey k\npage_bytes 16384\npeak -1\nextra 0\nfit each 1 2 3\n",
        "kvferry-calibration 1\nkey k\npage_bytes 16384\npeak 1\nextra 0\n",
        "kvferry-calibration 1\nkey k\npage_bytes 16384\npeak 1\nextra 0\nfit each 1 0 3\n",
        "kvferry-calibration 1\nkey k\npage_bytes 16384\npeak 1\nextra 0\nfit each 1 2 1000001\n",
        "kvferry-calibration 1\nkey k\npage_bytes 16384\npeak 1\nextra 0\nfit each 1 2\n",
        "kvferry-calibration 1\nkey k\npage_bytes 16384\npeak 1\nextra 0\nfit each 1 2 3 4\n",
        "kvferry-calibration 1\nkey k\npage_bytes 16384\npeak 1e3\nextra 0\nfit each 1 2 3\n",
        "kvferry-calibration 1\nkey k\npage_bytes 16384\npeak 1\nextra 0\nfit rope 1 2 3\n",
        too_fast,
        /* the last one is good */
        "kvferry-calibration 1\nkey k\npage_bytes 16384\npeak 1\nextra 0\nfit each 1 2 3\n",
    };
    const size_t count = sizeof bodies / sizeof *bodies;
    make_folder(&f);
    for (size_t i = 0; i < count; i++) {
        char text[FILE_MAX];
        kvf_calibration read;
        uint64_t hash = UINT64_C(0xcbf29ce484222325);
        for (const char *c = bodies[i]; *c != '\0'; c++)
            hash = (hash ^ (unsigned char)*c) * UINT64_C(0x100000001b3);
        const int bytes =
            snprintf(text, sizeof text, "%send %016llx\n", bodies[i], (unsigned long long)hash);
        write_all(f.file, text, (size_t)bytes);
        assert_int_equal(load(r, f.file, "k", &read), i + 1 == count);
    }
    remove_folder(&f);
}

/* So much time that a sanitizer on a loaded machine gets through all sizes too. */
static kvf_calibration_config patient(const folder *f)
{
    return (kvf_calibration_config){.path = f->file,
                                    .page_bytes = 4096,
                                    .budget_ns = UINT64_C(120000000000),
                                    .is_forced = 1,
                                    .gather_threads = 1,
                                    .memory = {.node = -1, .touch_threads = 1}};
}

RIG_TEST(test_measures)
{
    folder f;
    kvf_calibration first, again;
    kvf_transfer_choice a, b;
    struct stat before, after;
    make_folder(&f);
    kvf_calibration_config config = patient(&f);
    RIG_OK(kvf_calibrate(r->device, &config, &first));
    assert_true(first.is_measured && !first.is_cached);
    assert_true(first.seconds > 0);
    assert_true(first.peak_bytes_per_second > 1e6);
    printf("%s: %.2f s\n", first.key, first.seconds);
    for (uint32_t m = KVF_TRANSFER_GATHER; m < KVF_TRANSFER_METHODS; m++)
        printf("%s: %d, %.0f ns + %.4f ns per byte, R^2 %.3f\n", kvf_transfer_name((kvf_transfer)m),
               first.fit[m].is_measured, first.fit[m].intercept_ns, first.fit[m].ns_per_byte,
               first.fit[m].r_squared);
    assert_true(first.fit[KVF_TRANSFER_MAPPED].is_measured);
    assert_int_equal(stat(f.file, &before), 0);
    RIG_OK(kvf_calibrate(r->device, &config, &again));
    assert_true(again.is_cached);
    assert_same(&first, &again);
    assert_int_equal(stat(f.file, &after), 0);
    assert_int_equal(before.st_ino, after.st_ino); /* not written again */
    kvf_calibration_choose(&first, 4096, &a);
    kvf_calibration_choose(&again, 4096, &b);
    assert_memory_equal(&a, &b, sizeof a);
    /* Other workers, other pages: another key. */
    config.gather_threads = 2;
    RIG_OK(kvf_calibrate(r->device, &config, &again));
    assert_false(again.is_cached);
    assert_non_null(strstr(again.note, "another GPU"));
    config.gather_threads = 1;
    config.page_bytes = 512;
    RIG_OK(kvf_calibrate(r->device, &config, &again));
    assert_true(again.is_measured && !again.is_cached);
    assert_int_equal(again.page_bytes, 512);
    assert_true(again.peak_bytes_per_second > 1e6);
    config.page_bytes = 4096;
    RIG_OK(kvf_calibrate(r->device, &config, &again));
    assert_true(again.is_cached);
    config.must_measure = 1;
    config.budget_ns = 1; /* it would measure again, and has no time to */
    RIG_OK(kvf_calibrate(r->device, &config, &again));
    assert_false(again.is_cached || again.is_measured);
    remove_folder(&f);
}

static struct {
    void (*properties)(const kvf_device *device, kvf_device_properties *out);
    uint32_t generation, width;
} slot;

static void in_a_slot(const kvf_device *device, kvf_device_properties *out)
{
    slot.properties(device, out);
    out->link_generation = slot.generation;
    out->link_width = slot.width;
}

/* The same card in another slot has another link. */
RIG_TEST(test_slots)
{
    static const struct {
        uint32_t generation, width;
        const char *key;
    } slots[] = {{5, 16, "/gen5x16/"}, {4, 16, "/gen4x16/"}, {4, 8, "/gen4x8/"}};
    folder f;
    kvf_calibration c;
    make_folder(&f);
    const kvf_calibration_config config = patient(&f);
    kvf_device_ops ops = *r->device->ops;
    slot.properties = ops.properties;
    ops.properties = in_a_slot;
    r->device->ops = &ops;
    for (size_t i = 0; i < 2 * (sizeof slots / sizeof *slots); i++) {
        const size_t now = i / 2;
        slot.generation = slots[now].generation;
        slot.width = slots[now].width;
        RIG_OK(kvf_calibrate(r->device, &config, &c));
        assert_non_null(strstr(c.key, slots[now].key));
        assert_true(c.is_measured);
        assert_int_equal(c.is_cached, i % 2); /* measured, then read */
    }
    r->device->ops = r->ops;
    remove_folder(&f);
}

/* A file that cannot be written is a note; a device that needs no calibration gets none. */
RIG_TEST(test_edges)
{
    folder f;
    kvf_calibration c;
    kvf_device_properties properties;
    make_folder(&f);
    kvf_calibration_config config = patient(&f);
    config.path = "/nonexistent/folder/costs";
    RIG_OK(kvf_calibrate(r->device, &config, &c));
    assert_non_null(strstr(c.note, "cannot be written"));
    config.path = NULL;
    config.budget_ns = 1; /* no time for anything */
    RIG_OK(kvf_calibrate(r->device, &config, &c));
    assert_int_equal(c.is_measured, 0);
    r->ops->properties(r->device, &properties);
    if (properties.shares_host_memory) {
        config.is_forced = 0;
        RIG_OK(kvf_calibrate(r->device, &config, &c));
        assert_int_equal(c.is_measured, 0);
        assert_true(c.seconds == 0);
    }
    remove_folder(&f);
}

/* Every choice is one range of mapped, and no single other choice of that form costs less. */
TEST(test_choice)
{
    rig_random random = rig_seed("choice", 9);
    for (uint32_t round = 0; round < 300; round++) {
        kvf_calibration c = {.is_measured = 1, .page_bytes = 16384};
        kvf_transfer_choice choice;
        const size_t page_bytes = (size_t)1024 << rig_below(&random, 7);
        uint32_t ranges = 0;
        c.extra_ns = rig_below(&random, 5000);
        for (uint32_t m = KVF_TRANSFER_GATHER; m < KVF_TRANSFER_METHODS; m++)
            if (m == KVF_TRANSFER_MAPPED + round % 2 || rig_below(&random, 4) > 0)
                c.fit[m] =
                    (kvf_calibration_fit){.is_measured = 1,
                                          .intercept_ns = rig_below(&random, 60000),
                                          .ns_per_byte = 0.015 + rig_below(&random, 1000) * 1e-4};
        kvf_calibration_choose(&c, page_bytes, &choice);
        for (uint32_t b = 0; b < KVF_TRANSFER_BUCKETS; b++) {
            const uint32_t pages = b == 0 ? 1 : (uint32_t)(1.41421356 * (1u << b));
            const double cost = kvf_calibration_cost_ns(&c, choice.method[b], page_bytes, pages);
            assert_true(isfinite(cost));
            if (choice.method[b] == KVF_TRANSFER_MAPPED) {
                ranges += b == 0 || choice.method[b - 1] != KVF_TRANSFER_MAPPED;
                continue;
            }
            for (uint32_t m = KVF_TRANSFER_GATHER; m < KVF_TRANSFER_METHODS; m++)
                if (m != KVF_TRANSFER_MAPPED)
                    assert_true(cost <=
                                kvf_calibration_cost_ns(&c, (kvf_transfer)m, page_bytes, pages));
        }
        assert_true(ranges <= 1);
    }
    /* Lines that cross at 47 pages: mapped below, gather above, and nothing else. */
    kvf_calibration c = example("crossing", 1);
    kvf_transfer_choice choice;
    c.extra_ns = 0;
    c.fit[KVF_TRANSFER_MAPPED] = (kvf_calibration_fit){1, 5000, 0.0384, 1};
    kvf_calibration_choose(&c, 16384, &choice);
    for (uint32_t b = 0; b < KVF_TRANSFER_BUCKETS; b++)
        assert_int_equal(choice.method[b], b < 6 ? KVF_TRANSFER_MAPPED : KVF_TRANSFER_GATHER);
    /* Where standing ready costs more than it saves, the device takes all or nothing. */
    c.extra_ns = 1e9;
    kvf_calibration_choose(&c, 16384, &choice);
    for (uint32_t b = 1; b < KVF_TRANSFER_BUCKETS; b++)
        assert_int_equal(choice.method[b] == KVF_TRANSFER_MAPPED,
                         choice.method[0] == KVF_TRANSFER_MAPPED);
    c = (kvf_calibration){0};
    kvf_calibration_choose(&c, 16384, &choice);
    const kvf_transfer_choice usual = kvf_transfer_choice_default();
    assert_memory_equal(&choice, &usual, sizeof usual);
}
