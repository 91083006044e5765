/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_MODEL_CHAT_PARTS_H
#define KVF_MODEL_CHAT_PARTS_H

/* The pieces of a chat format, for the files of this room. */

#include "chat_format.h"

#define CHAT_MARKERS_MAX 4u
#define CHAT_SIGNS_MAX   3u

/* A chat on its way to text. */
typedef struct chat_writer {
    kvf_text *text;
    kvf_error *error;
    kvf_status status;   /* of the first append that failed: no other follows */
    const char *refusal; /* why the messages cannot be written; NULL = they can */
} chat_writer;

struct kvf_chat_format {
    const char *name;
    void (*put)(chat_writer *writer, const kvf_chat *chat);
    /* The text of a turn; NULL = as it is. */
    void (*put_text)(chat_writer *writer, const kvf_chat_message *message);
    const char *begin; /* in front of all messages; NULL = nothing */
    struct {
        const char *open, *middle, *close;
    } turn; /* around the role and the text of a turn; `open` and `close` around a question,
               `middle` in front of an answer */
    bool system_is_last; /* the system prompt stands in the last question, not the first */
    bool thinks;         /* the opening of an answer can end its thought */
    const char *markers[CHAT_MARKERS_MAX]; /* tokens; the last one ends an answer */
    /* A model's own template has these texts, and none of those; NULL = no more. */
    const char *has[CHAT_SIGNS_MAX], *lacks[CHAT_SIGNS_MAX];
};

#endif
