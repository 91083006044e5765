/* SPDX-License-Identifier: Apache-2.0 */

/* See the header. */

#include "chat_channels.h"

#include <string.h>

static bool find(const kvf_tokenizer *tokenizer, const char *marker, uint32_t *id)
{
    return kvf_tokenizer_find(tokenizer, marker, id) && kvf_tokenizer_is_special(tokenizer, *id);
}

kvf_channels kvf_channels_of(const kvf_tokenizer *tokenizer)
{
    kvf_channels c = {0};
    c.known = find(tokenizer, "<|start|>", &c.start) &&
              find(tokenizer, "<|channel|>", &c.channel) &&
              find(tokenizer, "<|message|>", &c.message) && find(tokenizer, "<|end|>", &c.end) &&
              find(tokenizer, "<|call|>", &c.call);
    return c;
}

/* Bytes without room are left out. */
static void note(kvf_channels *c, const char *bytes, size_t size)
{
    const size_t room = sizeof c->head - c->size;
    if (size > room)
        size = room;
    if (size > 0)
        memcpy(c->head + c->size, bytes, size);
    c->size += (uint32_t)size;
}

static bool is_channel(const kvf_channels *c, const char *name)
{
    const size_t size = strlen(name);
    return c->size - c->name >= size && memcmp(c->head + c->name, name, size) == 0 &&
           !memmem(c->head, c->size, "to=", 3);
}

/* The head of a message is complete. */
static kvf_status end_head(kvf_channels *c, kvf_text *text)
{
    static const char opening[] = "<think>";
    c->in_head = false;
    c->thinks = is_channel(c, "analysis");
    if (c->thinks)
        return kvf_text_append(text, opening, sizeof opening - 1, NULL);
    if (is_channel(c, "final") || c->size == 0)
        return KVF_OK;
    KVF_TRY(kvf_text_append(text, c->head, c->size, NULL));
    return kvf_text_append(text, "\n", 1, NULL);
}

kvf_status kvf_channels_push(kvf_channels *c, uint32_t id, kvf_text *text)
{
    static const char closing[] = "</think>\n\n";
    if (!c->known)
        return KVF_OK;
    if (id == c->start || id == c->channel) {
        if (id == c->start)
            c->size = 0;
        else if (c->size > 0)
            note(c, " ", 1);
        c->name = c->size;
        c->in_head = true;
    } else if (id == c->message && c->in_head) {
        return end_head(c, text);
    } else if (id == c->end && !c->in_head) {
        const bool thought = c->thinks;
        c->thinks = false;
        c->size = 0;
        return thought ? kvf_text_append(text, closing, sizeof closing - 1, NULL)
                       : kvf_text_append(text, "\n", 1, NULL);
    } else if (c->in_head) {
        note(c, text->bytes, text->size);
        text->size = 0;
    }
    return KVF_OK;
}
