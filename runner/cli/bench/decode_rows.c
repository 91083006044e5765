/* SPDX-License-Identifier: Apache-2.0 */

/*
 * From times and statistics of a case to its row. See the header.
 *
 * It knows what a step has to read, not how a case runs. Invariant: a cell that nothing was
 * measured for stays empty.
 */

#include "bench_decode.h"

#include "common/percentile.h"

#include <math.h>

const cli_column decode_columns[] = {DECODE_COLUMNS(CLI_COLUMN_ROW)};

void decode_row_names(const decode_case *c, cli_cell *row)
{
    char text[32];
    cli_cell_integer(&row[DECODE_CONTEXT], c->context);
    if (!c->is_dense)
        cli_cell_integer(&row[DECODE_BUDGET], c->config.budget_tokens);
    cli_cell_integer(&row[DECODE_BATCH], c->batch);
    cli_cell_text(&row[DECODE_SELECT], cli_show(kvf_cache_setting, "select", &c->config, text));
    cli_cell_text(&row[DECODE_METHOD], cli_show(kvf_cache_setting, "transfer", &c->config, text));
    cli_cell_text(&row[DECODE_PAGES], cli_show(kvf_cache_setting, "pages", &c->config, text));
    if (c->hot_heads < 1.0)
        cli_cell_real(&row[DECODE_HOT], c->hot_heads);
}

/* A token of a page: quantized ones by what the pool has for it. */
static double page_token_bytes(const decode_case *c, double exact)
{
    const kvf_cache_config *config = kvf_cache_settings(c->cache);
    const double tokens = (double)config->host_tokens_max * config->layers * config->kv_heads;
    return config->pages == KVF_PAGES_NATIVE || config->disk_path || config->head_mask
               ? exact
               : (double)kvf_cache_memory(c->cache)->host_kv_bytes / tokens;
}

/* Bytes that one layer of one step must read on the device: attended keys and values, and digests.
 */
static double bytes_to_read(const decode_case *c, const kvf_stats *s)
{
    const double layer_steps = (double)c->steps * c->config.layers;
    const double exact = 2.0 * c->config.head_dim * 2.0, token = page_token_bytes(c, exact);
    const double tokens = (double)c->context * c->config.kv_heads * (c->is_forked ? 1 : c->batch);
    const bool has_codes = c->config.digest == KVF_DIGEST_CODES;
    const double boxes = exact * c->config.sub_digests / c->config.page_size;
    const double code = c->config.head_dim / 4.0 + 2.0;
    const double coarse = (c->config.head_dim + 2.0) / 64.0 + (double)c->config.coarse_share * code;
    const double digest = has_codes ? c->hot_heads * code + (1.0 - c->hot_heads) * coarse : boxes;
    const bool has_digests = c->config.select != KVF_SELECT_FULL &&
                             c->config.select != KVF_SELECT_STREAMING &&
                             c->config.select != KVF_SELECT_STATIC;
    return (double)s->tokens_attended / layer_steps * token + (has_digests ? tokens * digest : 0.0);
}

/* Sorts the times. */
static void set_times(const decode_rates *rates, const decode_case *c, cli_cell *row)
{
    double mean = 0.0, *step = c->step_ns, *host = c->host_ns;
    kvf_sort(c->cpu_ns, c->steps);
    cli_cell_real(&row[DECODE_CPU], 1e-3 * kvf_percentile(c->cpu_ns, c->steps, 50));
    for (uint32_t i = 0; i < c->steps; i++)
        mean += step[i] / c->steps;
    kvf_sort(step, c->steps);
    kvf_sort(host, c->steps);
    const double median = kvf_percentile(step, c->steps, 50);
    cli_cell_real(&row[DECODE_MEDIAN], 1e-3 * median);
    cli_cell_real(&row[DECODE_P10], 1e-3 * kvf_percentile(step, c->steps, 10));
    cli_cell_real(&row[DECODE_P95], 1e-3 * kvf_percentile(step, c->steps, 95));
    cli_cell_real(&row[DECODE_P99], 1e-3 * kvf_percentile(step, c->steps, 99));
    cli_cell_real(&row[DECODE_MEAN], 1e-3 * mean);
    cli_cell_real(&row[DECODE_HOST], 1e-3 * kvf_percentile(host, c->steps, 50));
    cli_cell_real(&row[DECODE_VS_DENSE], rates->dense_ns / median * c->batch);
}

/* Phases of the device, where it has the times. Overhead is none of attention, scoring and the
 * refreshes of static sets: append, select and whatever the clock has beyond the sum of the parts.
 */
static void set_phases(const decode_case *c, const kvf_stats *s, cli_cell *row)
{
    const double per_us = 1e3 * c->steps * c->config.layers, mean_us = row[DECODE_MEAN].real;
    const uint64_t ns[] = {s->append_ns, s->score_ns,  s->select_ns, s->gather_ns,
                           s->copy_ns,   s->attend_ns, s->refresh_ns};
    if (!s->attend_ns)
        return;
    for (size_t i = 0; i < sizeof ns / sizeof *ns; i++)
        cli_cell_real(&row[DECODE_APPEND_US + i], (double)ns[i] / per_us);
    const double work_us = (double)(s->attend_ns + s->score_ns + s->refresh_ns) / per_us;
    cli_cell_real(&row[DECODE_OVERHEAD], 1.0 - fmin(1.0, work_us / mean_us));
    cli_cell_real(&row[DECODE_REFRESH], row[DECODE_REFRESH_US].real / mean_us);
}

/* Reads of the tier; per layer. */
static void set_disk(const decode_case *c, const kvf_stats *s, cli_cell *row)
{
    const double layer_steps = (double)c->steps * c->config.layers;
    const double pages = fmax(1.0, (double)s->pages_selected);
    const double bundles = fmax(1.0, (double)s->disk_wanted);
    cli_cell_real(&row[DECODE_PAGES_THERE], 1.0 - (double)s->pages_from_disk / pages);
    cli_cell_real(&row[DECODE_BUNDLES_THERE], 1.0 - (double)s->disk_reads / bundles);
    cli_cell_real(&row[DECODE_BUNDLES], (double)s->disk_wanted / layer_steps);
    cli_cell_real(&row[DECODE_FROM_DISK], (double)s->bytes_from_disk / layer_steps / 1048576.0);
    cli_cell_real(&row[DECODE_DISK_WAIT], 1e-3 * (double)s->disk_wait_ns / layer_steps);
    cli_cells_spread(&row[DECODE_VS_MEMORY], c->ratios, c->steps);
}

/* Beside sequences of their own. */
static void set_apart(const decode_case *c, cli_cell *row)
{
    cli_cell_integer(&row[DECODE_FORKS], 1);
    cli_cells_spread(&row[DECODE_VS_APART], c->ratios, c->steps);
}

static void set_work(const decode_rates *rates, const decode_case *c, const kvf_stats *s,
                     cli_cell *row)
{
    const double layer_steps = (double)c->steps * c->config.layers;
    const kvf_cache_plan *plan = kvf_cache_memory(c->cache);
    const kvf_cache_config in_force = {.transfer = plan->transfer};
    char text[32];
    const double read = bytes_to_read(c, s), moved = (double)s->bytes_to_device / layer_steps;
    const double floor_us = 1e-3 * fmax(read / rates->read_rate, moved / rates->link_rate);
    cli_cell_text(&row[DECODE_METHOD], cli_show(kvf_cache_setting, "transfer", &in_force, text));
    cli_cell_real(&row[DECODE_FLOOR], floor_us);
    cli_cell_real(&row[DECODE_OF_FLOOR], row[DECODE_MEDIAN].real / floor_us);
    cli_cell_real(&row[DECODE_TOKENS],
                  (double)s->tokens_attended / layer_steps / c->batch / c->config.kv_heads);
    cli_cell_integer(&row[DECODE_READ], (uint64_t)(read + 0.5));
    cli_cell_integer(&row[DECODE_MOVED], (uint64_t)(moved + 0.5));
    cli_cell_real(&row[DECODE_HITS], (double)s->hits / fmax(1.0, (double)s->pages_selected));
    if (plan->disk_bundle_bytes)
        set_disk(c, s, row);
    if (c->is_forked)
        set_apart(c, row);
    cli_cell_integer(&row[DECODE_DEVICE_BYTES],
                     plan->device_kv_bytes + plan->device_digest_bytes + plan->device_table_bytes);
    cli_cell_integer(&row[DECODE_HOST_BYTES],
                     plan->host_kv_bytes + plan->host_staging_bytes + plan->host_table_bytes);
}

void decode_row_results(const decode_case *c, decode_rates *rates)
{
    kvf_stats s;
    kvf_cache_stats(c->cache, &s);
    set_times(rates, c, c->row);
    set_phases(c, &s, c->row);
    set_work(rates, c, &s, c->row);
    if (c->is_dense)
        rates->dense_ns = 1e3 * c->row[DECODE_MEDIAN].real;
}
