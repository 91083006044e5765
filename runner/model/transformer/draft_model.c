/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Guesses of a smaller model; see the header.
 *
 * It knows which ids its sequence holds. Where these are not those that were seen, because a guess
 * was wrong or another question began, they are cut off. So the sequence may be behind, never
 * beside.
 */

#include "generate.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

struct kvf_draft_model {
    kvf_session session;
    kvf_sequence *sequence;
    uint32_t vocab_size;
    size_t count, ids_max;
    uint32_t ids[]; /* [ids_max], of which the sequence holds the first `count` */
};

kvf_status kvf_draft_model_create(const kvf_session *session, kvf_sequence *sequence,
                                  uint32_t vocab_size, size_t ids_max, kvf_draft_model **out,
                                  kvf_error *error)
{
    const size_t bytes = sizeof(kvf_draft_model) + ids_max * sizeof(uint32_t);
    *out = calloc(1, bytes);
    if (!*out)
        return model_out_of_memory(error, bytes, "the ids of a draft model");
    (*out)->session = *session;
    (*out)->sequence = sequence;
    (*out)->vocab_size = vocab_size;
    (*out)->ids_max = ids_max;
    return KVF_OK;
}

void kvf_draft_model_destroy(kvf_draft_model *model)
{
    free(model);
}

/* The sequence holds a beginning of all ids but the last. */
static kvf_status go_back(kvf_draft_model *m, const uint32_t *ids, size_t count, kvf_error *error)
{
    size_t same = 0;
    while (same < m->count && same + 1 < count && m->ids[same] == ids[same])
        same++;
    if (same == m->count)
        return KVF_OK;
    m->count = same;
    return kvf_session_finish(
        &m->session,
        kvf_sequence_truncate(m->session.cache, m->sequence, (uint32_t)same, m->session.stream),
        error);
}

/* And now all but the last. */
static kvf_status read_rest(kvf_draft_model *m, const uint32_t *ids, size_t count, kvf_error *error)
{
    const kvf_prefill_request request = {
        .sequence = m->sequence, .ids = ids + m->count, .count = (uint32_t)(count - 1 - m->count)};
    kvf_stop stop;
    if (request.count <= m->session.step_tokens)
        KVF_TRY(kvf_generate_extend(&m->session, &request, &stop, error));
    else
        KVF_TRY(kvf_generate_prefill(&m->session, &request, &stop, error));
    memcpy(m->ids + m->count, request.ids, request.count * sizeof *m->ids);
    m->count = count - 1;
    return KVF_OK;
}

static uint32_t likeliest(const float *logits, uint32_t count)
{
    uint32_t best = 0;
    for (uint32_t i = 1; i < count; i++)
        if (logits[i] > logits[best] || isnan(logits[best]))
            best = i;
    return best;
}

kvf_status kvf_draft_model_guess(void *model, const uint32_t *ids, size_t count, uint32_t most,
                                 uint32_t *guess, uint32_t *guessed, kvf_error *error)
{
    kvf_draft_model *m = model;
    kvf_transformer *t = m->session.transformer;
    *guessed = 0;
    if (count + most > m->ids_max)
        return KVF_OK;
    KVF_TRY(go_back(m, ids, count, error));
    KVF_TRY(read_rest(m, ids, count, error));
    for (uint32_t next = ids[count - 1]; *guessed < most; next = guess[(*guessed)++]) {
        const kvf_status status = kvf_transformer_decode(t, m->session.cache, &m->sequence, &next,
                                                         1, true, m->session.stream);
        KVF_TRY(kvf_session_finish(&m->session, status, error));
        m->ids[m->count++] = next;
        guess[*guessed] = likeliest(kvf_transformer_logits(t, 0), m->vocab_size);
    }
    return KVF_OK;
}
