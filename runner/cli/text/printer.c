/* SPDX-License-Identifier: Apache-2.0 */

/* Tokens to standard output; see the header. */

#include "printer.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "common/text.h"

static void fail(cli_printer *p, const char *text)
{
    if (!p->failed)
        fprintf(stderr, "kvferry: %s\n", text);
    p->failed = true;
}

static void print_bytes(cli_printer *p, char *bytes, size_t size)
{
    char text[160];
    if (size == 0)
        return;
    for (size_t i = 0; p->one_line && i < size; i++)
        if (bytes[i] == '\n' || bytes[i] == '\r')
            bytes[i] = ' ';
    if (p->copy && kvf_text_append(p->copy, bytes, size, NULL) != KVF_OK)
        fail(p, "no memory for the answer");
    if (p->silent || (fwrite(bytes, 1, size, stdout) == size && fflush(stdout) == 0))
        return;
    snprintf(text, sizeof text, "standard output cannot be written: %s", kvf_errno_text(errno));
    fail(p, text);
}

void cli_printer_begin(cli_printer *p, const cli_stop_texts *stop)
{
    p->stream = (kvf_token_stream){.tokenizer = p->tokenizer, .skip_special = true};
    p->filter = (cli_stop_filter){.stop = stop};
    p->started = p->failed = false;
}

/* Text that a token completed goes through the filter; @p token is freed. */
static void print_text(cli_printer *p, kvf_text *token, kvf_status status)
{
    kvf_text out = {0};
    if (status == KVF_OK)
        status = cli_stop_push(&p->filter, token->bytes, token->size, &out, NULL);
    if (status == KVF_OK)
        print_bytes(p, out.bytes, out.size);
    else
        fail(p, "no memory for the answer");
    kvf_text_free(&out);
    kvf_text_free(token);
}

bool cli_printer_token(cli_printer *p, uint32_t id)
{
    kvf_text text = {0};
    const bool is_first = !p->started;
    p->started = true;
    if (!p->tokenizer) {
        char number[16];
        const int size = snprintf(number, sizeof number, "%s%u", is_first ? "" : " ", id);
        print_bytes(p, number, (size_t)size);
    } else if (id < kvf_tokenizer_size(p->tokenizer) && !kvf_ids_have(p->ends, p->end_count, id)) {
        /* a model may have more rows than tokens */
        const kvf_status status = kvf_token_stream_push(&p->stream, id, &text, NULL);
        print_text(p, &text, status);
    }
    return !p->filter.found && !p->failed;
}

void cli_printer_end(cli_printer *p)
{
    kvf_text text = {0}, rest = {0};
    char newline[] = "\n";
    if (p->tokenizer) {
        const kvf_status status = kvf_token_stream_finish(&p->stream, &text, NULL);
        print_text(p, &text, status);
        if (cli_stop_finish(&p->filter, &rest, NULL) == KVF_OK)
            print_bytes(p, rest.bytes, rest.size);
        kvf_text_free(&rest);
    }
    cli_stop_free(&p->filter);
    p->one_line = false;
    p->copy = NULL;
    print_bytes(p, newline, 1);
}
