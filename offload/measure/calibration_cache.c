/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The file of calibration: records of lines of text, each with a version, a key and a checksum.
 *
 *   kvferry-calibration 1
 *   key GPU-.../driver-13000/...
 *   page_bytes 16384
 *   peak 53000000000            bytes per second
 *   extra 2500                  ns
 *   fit gather 11800 18800 999812     ns, 1e-6 ns per byte, 1e-6 of R^2
 *   fit ...
 *   end 0123456789abcdef        FNV-1a of all bytes of the record before this line
 *
 * Whole numbers only, so that no locale changes a file. Reading is strict: a record that is not
 * exactly of this form, with the right checksum, does not exist. Writing goes to a temporary file
 * in the same folder, to the disk, and over the old one. Knows nothing of measuring.
 */

#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "common/files.h"
#include "common/text.h"
#include "plain_file.h"
#include "transfer_calibrate.h"

#define FILE_BYTES_MAX ((size_t)64 << 10)
#define RECORD_MAX     ((size_t)2048)
#define HEADER         "kvferry-calibration "
#define END            "end "

static uint64_t checksum(const char *text, size_t bytes)
{
    uint64_t hash = UINT64_C(0xcbf29ce484222325);
    for (size_t i = 0; i < bytes; i++)
        hash = (hash ^ (unsigned char)text[i]) * UINT64_C(0x100000001b3);
    return hash;
}

/* ---- reading ---- */

/* The whole file, NUL-terminated; NULL with errno if there is none or it is absurdly large. */
static char *read_file(kvf_context *context, const char *path, size_t *bytes)
{
    struct stat about;
    const int descriptor = kvf_open_regular(path, &about);
    FILE *file = descriptor < 0 ? NULL : fdopen(descriptor, "rb");
    if (!file) {
        if (descriptor >= 0)
            (void)close(descriptor);
        errno = descriptor == KVF_NO_REGULAR_FILE ? EINVAL : errno;
        return NULL;
    }
    char *text = kvf_alloc(context, FILE_BYTES_MAX + 1, 1);
    if (text) {
        *bytes = fread(text, 1, FILE_BYTES_MAX + 1, file);
        if (ferror(file) || *bytes > FILE_BYTES_MAX) {
            kvf_free(context, text);
            text = NULL;
            errno = EFBIG;
        } else {
            text[*bytes] = '\0';
        }
    } else {
        errno = ENOMEM;
    }
    fclose(file);
    return text;
}

/* Bytes of the record at `text`, its checksum right; 0 if there is no whole one. */
static size_t record_length(const char *text, size_t bytes)
{
    const size_t header = sizeof HEADER - 1, end = sizeof END - 1;
    if (bytes < header || memcmp(text, HEADER, header) != 0)
        return 0;
    for (size_t at = header; at + end + 17 <= bytes; at++) {
        char wanted[18];
        if (text[at - 1] != '\n' || memcmp(text + at, END, end) != 0)
            continue;
        snprintf(wanted, sizeof wanted, "%016" PRIx64 "\n", checksum(text, at));
        return memcmp(text + at + end, wanted, 17) == 0 ? at + end + 17 : 0;
    }
    return 0;
}

/* "word number" at *text, moved after it; 0 if it is not there. */
static bool take_text(const char **text, const char *word)
{
    const size_t length = strlen(word);
    if (strncmp(*text, word, length) != 0)
        return false;
    *text += length;
    return true;
}

/* A whole number in a closed range. */
static bool take_number(const char **text, char behind, double low, double high, double *out)
{
    char *end;
    if (**text != '-' && (**text < '0' || **text > '9'))
        return false;
    errno = 0;
    const long long value = strtoll(*text, &end, 10);
    if (errno != 0 || end == *text || *end != behind || (double)value < low || (double)value > high)
        return false;
    *text = end + 1;
    *out = (double)value;
    return true;
}

static bool take_fit(const char **text, kvf_transfer method, kvf_calibration_fit *fit)
{
    char word[32];
    double intercept, slope, r_squared;
    snprintf(word, sizeof word, "fit %s ", kvf_transfer_name(method));
    if (!take_text(text, word))
        return true; /* was not measured */
    if (!take_number(text, ' ', -1e12, 1e12, &intercept) ||
        !take_number(text, ' ', 1, 1e15, &slope) ||
        !take_number(text, '\n', 0, 1000000, &r_squared))
        return false;
    *fit = (kvf_calibration_fit){.is_measured = true,
                                 .intercept_ns = intercept,
                                 .ns_per_byte = slope * 1e-6,
                                 .r_squared = r_squared * 1e-6};
    return true;
}

/* 1: parsed into *out; 0: of another key; -1: not of this form. */
static int parse(const char *text, const char *key, kvf_calibration *out)
{
    char line[KVF_CALIBRATION_KEY_MAX + 8];
    double page_bytes, version;
    if (!take_text(&text, HEADER) || !take_number(&text, '\n', 0, 1e9, &version) ||
        version != KVF_CALIBRATION_VERSION)
        return -1;
    snprintf(line, sizeof line, "key %s\n", key);
    if (!take_text(&text, line))
        return 0;
    if (!take_text(&text, "page_bytes ") || !take_number(&text, '\n', 64, 1 << 30, &page_bytes) ||
        !take_text(&text, "peak ") ||
        !take_number(&text, '\n', 0, 1e15, &out->peak_bytes_per_second) ||
        !take_text(&text, "extra ") || !take_number(&text, '\n', 0, 1e12, &out->extra_ns))
        return -1;
    for (uint32_t m = 0; m < KVF_TRANSFER_METHODS; m++) {
        if (!take_fit(&text, (kvf_transfer)m, &out->fit[m]))
            return -1;
        out->is_measured |= out->fit[m].is_measured;
    }
    if (!take_text(&text, END) || !out->is_measured)
        return -1;
    out->page_bytes = (size_t)page_bytes;
    return 1;
}

bool kvf_calibration_load(kvf_context *context, const char *path, kvf_calibration *out)
{
    size_t bytes = 0, length = 0;
    char *text = read_file(context, path, &bytes);
    if (!text) {
        if (errno != ENOENT)
            snprintf(out->note, sizeof out->note, "calibration %.160s cannot be read: %.60s", path,
                     kvf_errno_text(errno));
        return false;
    }
    const size_t page_bytes = out->page_bytes;
    int found = bytes > 0 ? 0 : -1;
    for (size_t at = 0; at < bytes && found == 0; at += length) {
        kvf_calibration read = {.page_bytes = page_bytes};
        length = record_length(text + at, bytes - at);
        found = length > 0 ? parse(text + at, out->key, &read) : -1;
        if (found == 1 && read.page_bytes != page_bytes)
            found = -1;
        if (found != 1)
            continue;
        memcpy(read.key, out->key, sizeof read.key);
        read.is_cached = true;
        *out = read;
    }
    kvf_free(context, text);
    if (found != 1)
        snprintf(out->note, sizeof out->note, "calibration %.160s %s; measured anew", path,
                 found == 0 ? "is of another GPU, driver, link or setting"
                            : "is damaged or of another version");
    return found == 1;
}

/* ---- writing ---- */

static size_t format(const kvf_calibration *c, char record[RECORD_MAX])
{
    size_t n = (size_t)kvf_format(
        record, RECORD_MAX, HEADER "%u\nkey %s\npage_bytes %zu\npeak %.0f\nextra %.0f\n",
        KVF_CALIBRATION_VERSION, c->key, c->page_bytes, c->peak_bytes_per_second, c->extra_ns);
    for (uint32_t m = 0; m < KVF_TRANSFER_METHODS && n < RECORD_MAX; m++) {
        const kvf_calibration_fit *fit = &c->fit[m];
        const double slope = rint(fit->ns_per_byte * 1e6);
        if (fit->is_measured)
            n += (size_t)kvf_format(record + n, RECORD_MAX - n, "fit %s %.0f %.0f %.0f\n",
                                    kvf_transfer_name((kvf_transfer)m), fit->intercept_ns,
                                    slope > 1 ? slope : 1, fit->r_squared * 1e6);
    }
    KVF_ASSERT(n + 64 < RECORD_MAX);
    return n + (size_t)snprintf(record + n, RECORD_MAX - n, END "%016" PRIx64 "\n",
                                checksum(record, n));
}

/* Records of other keys that are whole and of this version. */
static void write_others(FILE *file, const char *text, size_t bytes, const char *key)
{
    size_t length;
    for (size_t at = 0; at < bytes; at += length) {
        kvf_calibration other = {0};
        length = record_length(text + at, bytes - at);
        if (length == 0)
            return;
        if (parse(text + at, key, &other) == 0)
            (void)fwrite(text + at, 1, length, file);
    }
}

static bool write_all(kvf_context *context, FILE *file, const char *path, const kvf_calibration *c)
{
    char record[RECORD_MAX];
    size_t bytes = 0;
    const size_t length = format(c, record);
    char *text = read_file(context, path, &bytes);
    (void)fwrite(record, 1, length, file);
    /* A file that grows without end has old keys at its end. */
    if (text && bytes + length <= FILE_BYTES_MAX)
        write_others(file, text, bytes, c->key);
    kvf_free(context, text);
    return fflush(file) == 0 && !ferror(file) && fsync(fileno(file)) == 0;
}

/* Writes beside the file, and takes its place. @return 0, or the errno */
static int replace(kvf_context *context, const char *path, char *place, char *temporary,
                   const kvf_calibration *calibration)
{
    struct stat old;
    const char *what;
    if (kvf_file_bytes_max() < 2 * FILE_BYTES_MAX)
        return EFBIG; /* writing would bring a signal */
    const int descriptor = kvf_open_beside(path, ".", place, temporary, &what);
    if (descriptor < 0)
        return errno;
    if (stat(place, &old) == 0)
        (void)kvf_keep_owner(descriptor, place, &old);
    FILE *file = fdopen(descriptor, "wb");
    int code = file && write_all(context, file, path, calibration) ? 0 : errno ? errno : EIO;
    if ((file ? fclose(file) : close(descriptor)) != 0 && code == 0)
        code = errno;
    if (code == 0 && rename(temporary, place) != 0)
        code = errno;
    if (code != 0)
        (void)unlink(temporary);
    return code;
}

bool kvf_calibration_save(kvf_context *context, const char *path, kvf_calibration *calibration)
{
    char *place = kvf_alloc(context, PATH_MAX, 1);
    char *temporary = kvf_alloc(context, KVF_BESIDE_BYTES, 1);
    int code = ENOMEM;
    if (place && temporary)
        code = kvf_new_file_obstacle(path) ? EINVAL
                                           : replace(context, path, place, temporary, calibration);
    kvf_free(context, place);
    kvf_free(context, temporary);
    const bool is_written = code == 0;
    if (!is_written)
        snprintf(calibration->note, sizeof calibration->note,
                 "calibration %.160s cannot be written: %.60s", path, kvf_errno_text(code));
    return is_written;
}
